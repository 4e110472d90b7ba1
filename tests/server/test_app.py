"""What all routes share, and what a server bears: floods, clients that leave, nonsense, and thousands of requests."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

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
