"""The control routes of servers that run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig

from eightfold import __version__
from tests.models.checkpoints import SIZES, Case, save_checkpoint
from tests.server.live import DEADLINE, LiveServer, eventually

ENDLESS = {"prompt": "hello world", "max_tokens": 200_000, "temperature": 0}


def in_background(server: LiveServer, body: dict[str, Any]) -> tuple[threading.Thread, list[httpx.Response]]:
    """A request that another thread waits for, once it runs."""
    answers: list[httpx.Response] = []
    before = server.metric("vllm:num_requests_running")
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    eventually(lambda: server.metric("vllm:num_requests_running"), lambda running: running > before)
    return thread, answers


def test_health_ready_and_version(null_server: LiveServer) -> None:
    health = null_server.get("/health")
    assert health.status_code == 200
    assert (health.json()["status"], health.json()["state"]) == ("ok", "ready")
    assert null_server.get("/ready").json() == {"status": "ready"}
    assert null_server.get("/version").json() == {"version": __version__}
    assert null_server.get("/health_generate").json() == {"status": "ok"}


def test_models(null_server: LiveServer, tiny_checkpoint: Path) -> None:
    (card,) = null_server.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["root"], card["max_model_len"]) == ("tiny", "model", str(tiny_checkpoint), 300_000)
    assert null_server.get("/v1/models/tiny").json() == card
    unknown = null_server.get("/v1/models/other/name")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_server_info_tells_settings_and_numbers_but_no_key(null_server: LiveServer) -> None:
    info = null_server.get("/server_info").json()
    assert (info["version"], info["state"], info["server"]["engine"]) == (__version__, "ready", "null")
    assert info["snapshot"]["num_blocks"] > 0
    assert "api_key" not in info["server"]
    assert null_server.get("/get_server_info").status_code == 200


def test_model_info_tells_what_became_of_every_tensor(tiny_server: LiveServer) -> None:
    info = tiny_server.get("/model_info").json()
    assert (info["served_model_name"], info["weight_version"], info["vocab_size"]) == ("tiny", "default", 300)
    rows = {row["name"]: row for row in info["quantization"]}
    assert rows["model.norm.weight"]["quantized"] is False
    assert rows["model.norm.weight"]["bytes_before"] > 0
    assert {row["operation"] for row in info["backends"]} >= {"attention"}


def test_a_request_is_aborted_by_its_id(null_server: LiveServer) -> None:
    with null_server.client() as client:
        request = client.build_request("POST", "/v1/completions", json=ENDLESS | {"stream": True})
        response = client.send(request, stream=True)
        lines = response.iter_lines()
        answer_id = next(lines).partition('"id":"')[2].partition('"')[0]
        done = null_server.post("/abort_request", {"rid": answer_id})
        assert (done.status_code, done.json()["num_aborted"]) == (200, 1)
        *_, last, _ = [line for line in lines if line]
    assert '"finish_reason":"abort"' in last
    assert null_server.post("/abort_request", {"rid": "nobody"}).json()["num_aborted"] == 0
    eventually(null_server.is_idle)


def test_all_requests_are_aborted(null_server: LiveServer) -> None:
    threads = [in_background(null_server, ENDLESS) for _ in range(2)]
    assert null_server.post("/abort_request", {"abort_all": True}).json()["num_aborted"] == 2
    for thread, answers in threads:
        thread.join(DEADLINE)
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    eventually(null_server.is_idle)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/abort_request", {}, ("rid", "neither")),
        ("/abort_request", {"rid": "a", "abort_all": True}, ("rid", "both")),
        ("/abort_request", {"ridd": "a"}, ("ridd", "rid, the nearest known field")),
        ("/abort_request", b"{", ("body", "broken JSON")),
        ("/flush_cache", {"zz": 1}, ("zz", "a field that is unknown", "no fields")),
        ("/continue_generation", {"user": "x"}, ("user", "a field that is unknown")),
        ("/continue_generation", b"[]", ("body", "expected a JSON object")),
        ("/pause_generation", {"mode": "retract"}, ("mode", "'retract'", '"abort"', '"in_place"')),
        ("/update_weights_from_disk", {}, ("model_path", "nothing")),
        ("/update_weights_from_disk", {"model_path": "x", "flush_cache": False}, ("flush_cache", "False", "true")),
        ("/update_weights_from_disk", {"model_path": "x", "manifest": {}}, ("manifest", "unknown")),
    ],
)
def test_bad_bodies_are_refused_by_name(null_server: LiveServer, path: str, body: Any, words: tuple[str, ...]) -> None:
    response = null_server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", words[0])
    for word in words:
        assert word in error["message"]


def test_generation_pauses_in_place_and_goes_on(null_server: LiveServer) -> None:
    thread, answers = in_background(null_server, ENDLESS | {"max_tokens": 1000})
    paused = null_server.post("/pause_generation", {"mode": "in_place"}).json()
    assert (paused["success"], paused["num_aborted"], paused["num_paused"]) == (True, 0, 1)
    steps = eventually(lambda: null_server.get("/server_info").json()["snapshot"], lambda now: now["is_paused"])["num_steps"]
    assert null_server.get("/health").status_code == 200
    assert null_server.get("/server_info").json()["snapshot"]["num_steps"] == steps
    assert null_server.post("/continue_generation").status_code == 200
    thread.join(DEADLINE)
    assert answers[0].json()["usage"]["completion_tokens"] == 1000
    eventually(null_server.is_idle)


def test_a_pause_that_aborts_ends_what_runs(null_server: LiveServer) -> None:
    thread, answers = in_background(null_server, ENDLESS)
    assert null_server.post("/pause_generation").json()["num_aborted"] == 1
    thread.join(DEADLINE)
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    null_server.post("/continue_generation")
    eventually(null_server.is_idle)


def test_the_cache_is_flushed(null_server: LiveServer) -> None:
    body = {"prompt": "hello world " * 20, "max_tokens": 1}

    def cached() -> int:
        usage = null_server.post("/v1/completions", body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert null_server.post("/flush_cache").json()["success"] is True
    assert cached() == 0
    assert cached() > 0
    assert null_server.get("/flush_cache").json()["success"] is True
    assert cached() == 0


def test_weights_are_replaced_and_a_wrong_checkpoint_is_refused(
    tiny_server: LiveServer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = SIZES | {"vocab_size": 300}
    other = save_checkpoint(Case("other", lambda: LlamaConfig(**sizes)), tmp_path / "other", seed=5)
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}

    def answer() -> Any:
        return tiny_server.post("/v1/completions", body).json()["choices"][0]["logprobs"]["token_logprobs"]

    before = answer()
    done = tiny_server.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "2"})
    assert (done.status_code, done.json()["success"]) == (200, True), done.text
    assert answer() != before
    info = tiny_server.get("/model_info").json()
    assert (info["model_path"], info["weight_version"]) == (str(other), "2")
    back = tiny_server.post("/update_weights_from_disk", {"model_path": str(tiny_checkpoint), "weight_version": "default"})
    assert back.status_code == 200
    assert answer() == before

    wrong = tiny_server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")})
    assert (wrong.status_code, wrong.json()["success"]) == (400, False)
    assert "nowhere" in wrong.json()["message"]
    assert answer() == before


def test_the_null_engine_has_no_weights(null_server: LiveServer, tiny_checkpoint: Path) -> None:
    refused = null_server.post("/update_weights_from_disk", {"model_path": str(tiny_checkpoint)})
    assert (refused.status_code, refused.json()["success"]) == (400, False)
