"""What all routes share, and what a server bears: floods, clients that leave, nonsense, and thousands of requests."""

from __future__ import annotations

import http.client
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_tokenizer
from tests.server.live import LiveServer, eventually, live_server
from tests.server.test_openai import malformed

SHORT = {"prompt": "hello", "max_tokens": 2}


def send(server: LiveServer, requests: Iterator[tuple[str, bytes]]) -> list[tuple[int, dict[str, Any]]]:
    """One answer for each, over one connection."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    answers = []
    for path, body in requests:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        answers.append((response.status, json.loads(response.read())))
    connection.close()
    return answers


def short(count: int) -> Iterator[tuple[str, bytes]]:
    return (("/v1/completions", json.dumps(SHORT).encode()) for _ in range(count))


def memory_bytes(server: LiveServer) -> int:
    """Memory of the server's processes that no file backs."""
    pids = {server.process.pid} | server.children()
    status = [Path(f"/proc/{pid}/status").read_text().splitlines() for pid in pids]
    return sum(int(line.split()[1]) * 1024 for lines in status for line in lines if line.startswith("RssAnon"))


def test_an_unknown_route_and_a_wrong_method_are_named(null_server: LiveServer) -> None:
    unknown = null_server.post("/v1/chat/completion", SHORT)
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "unknown_route"
    assert "Did you mean /v1/chat/completions?" in unknown.json()["error"]["message"]
    wrong = null_server.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "method: got GET for /v1/completions; expected POST"


def test_the_documentation_lists_every_route(null_server: LiveServer) -> None:
    listed = null_server.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/generate", "/version"):
        assert path in listed, path
    for path in ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk"):
        assert path in listed, path
    assert null_server.get("/docs").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_numbers_beyond_any_use_are_refused_and_hold_no_place(null_server: LiveServer, path: str) -> None:
    names = ["top_k", "max_tokens", "min_tokens", "seed", "n", "logprobs", "stop_token_ids", "logit_bias", "prompt"]
    if path == "/generate":
        names = ["max_new_tokens", "min_new_tokens", "top_k", "sampling_seed", "n", "stop_token_ids", "logit_bias"]
    requests = []
    for name in names:
        for number in (2**64, 10**30, -(2**64)):
            value: Any = (
                [number] if name in ("stop_token_ids", "prompt") else {str(number): 1} if name == "logit_bias" else number
            )
            if path == "/generate":
                body: dict[str, Any] = {"text": "a", "sampling_params": {name: value}}
            elif path == "/v1/completions":
                body = {"prompt": "a", name: value}
            else:
                body = {"messages": [{"role": "user", "content": "a"}], name: value}
            requests.append((path, json.dumps(body).encode()))
    answers = send(null_server, iter(requests))  # over one connection, which no answer may end
    assert {status for status, _ in answers} == {400}
    for (_, raw), (_, told) in zip(requests, answers, strict=True):
        assert told["error"]["param"].rpartition(".")[2] in raw.decode(), told
    assert null_server.get("/server_info").json()["open_requests"] == 0


def test_a_body_that_can_never_fit_the_queue_is_refused_for_good(tiny_checkpoint: Path) -> None:
    flags = ("--engine", "null", "--max-running-requests", "2", "--max-queued-requests", "4")
    with live_server(tiny_checkpoint, *flags) as server:
        for fields, param in (({"n": 7}, "n"), ({"prompt": ["a"] * 7}, "prompt"), ({"prompt": ["a", "b"], "n": 4}, "n")):
            response = server.post("/v1/completions", SHORT | fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        for fields in ({"n": 6}, {"prompt": ["a"] * 6}, {"prompt": ["a", "b"], "n": 3}):
            assert len(server.post("/v1/completions", SHORT | fields).json()["choices"]) == 6


def test_a_grammar_that_runs_into_a_limit_ends_in_an_error_of_its_field(tiny_server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 200, "guided_regex": "((a{1,100}){1,100}){1,100}", "min_tokens": 150}
    whole = tiny_server.post("/v1/completions", body)
    error = whole.json()["error"]
    assert (whole.status_code, error["param"]) == (400, "guided_regex")
    assert "runs into the limit of work on its regular expressions" in error["message"]
    stream = tiny_server.post("/v1/completions", body | {"stream": True}).text.rstrip().split("\n\n")
    assert json.loads(stream[-1].removeprefix("data: "))["error"]["param"] == "guided_regex"
    impossible = tiny_server.post("/v1/completions", {"prompt": "a", "guided_regex": r"[^\s\S]"})
    assert (impossible.status_code, impossible.json()["error"]["param"]) == (400, "guided_regex")
    assert "one that some answer fits" in impossible.json()["error"]["message"]
    assert any("after" in line and "limit of work" in line for line in tiny_server.lines)
    eventually(tiny_server.is_idle)


def test_a_model_that_may_think_keeps_to_its_structure(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}
    (opening,) = tiny_tokenizer.make().encode("<", add_special_tokens=False)
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 40}
    never, always = {str(opening): -100}, {str(opening): 100}
    template = tmp_path / "tools.jinja"
    template.write_text(tiny_tokenizer.CHAT_TEMPLATE + "{# tools #}")
    flags = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--chat-template", str(template))
    with live_server(tiny_checkpoint, *flags) as server:

        def answer(**fields: Any) -> Any:
            return server.post("/v1/chat/completions", body | fields).json()["choices"][0]

        told = answer(guided_regex="[0-9]{3}", logit_bias=never)
        assert re.fullmatch("[0-9]{3}", told["message"]["content"])
        assert told["finish_reason"] == "stop"
        schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["ab", "cd"]}}}
        assert json.loads(answer(response_format=schema, logit_bias=never)["message"]["content"]) in ("ab", "cd")
        thinks = answer(guided_regex="[0-9]{3}", logit_bias=always)["message"]
        assert thinks["reasoning_content"].startswith("<<<")
        assert not thinks["content"]
        (call,) = answer(tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}})["message"]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}


def test_a_flood_gets_one_answer_for_each_request_and_leaves_nothing(tiny_checkpoint: Path) -> None:
    flags = ("--engine", "null", "--null-step-ms", "5", "--max-running-requests", "2", "--max-queued-requests", "4")
    with live_server(tiny_checkpoint, *flags) as server:
        with ThreadPoolExecutor(24) as pool:
            answers = [answer for part in pool.map(lambda _: send(server, short(8)), range(24)) for answer in part]
        statuses = Counter(status for status, _ in answers)
        assert set(statuses) == {200, 429}
        assert statuses.total() == 192
        for status, body in answers:
            assert body["usage"]["completion_tokens"] == 2 if status == 200 else body["error"]["code"] == "queue_full"
        eventually(server.is_idle)
        assert server.metric("vllm:request_success_total") == statuses[200]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell the memory of a process")
def test_memory_is_flat_over_thousands_of_requests_good_and_bad(null_server: LiveServer) -> None:
    send(null_server, short(500))
    send(null_server, map(malformed, range(500)))
    before = memory_bytes(null_server)
    assert {status for status, _ in send(null_server, short(2000))} == {200}
    assert all("error" in body for _, body in send(null_server, map(malformed, range(500))))
    assert memory_bytes(null_server) - before < 4 * 2**20
    eventually(null_server.is_idle)
