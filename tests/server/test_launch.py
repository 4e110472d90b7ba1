"""A server's whole life, in processes as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.live import DEADLINE, LiveServer, eventually, live_server, processes

# A stream that goes on for minutes, of an engine that takes a millisecond a token.
ENDLESS = {"prompt": "hello world", "max_tokens": 200_000, "stream": True, "temperature": 0}
SLOW_NULL = ("--engine", "null", "--null-step-ms", "1", "--context-length", "300000")


def begin(server: LiveServer, client: httpx.Client, **changes: Any) -> tuple[httpx.Response, Iterator[str]]:
    """A stream whose first events were read."""
    response = client.send(client.build_request("POST", "/v1/completions", json=ENDLESS | changes), stream=True)
    assert response.status_code == 200, response.read()
    lines = response.iter_lines()
    assert next(lines).startswith("data: ")
    return response, lines


def last_event(lines: Iterator[str]) -> Any:
    """The last event of a stream before the [DONE] that it may have."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return json.loads([event for event in events if event != "[DONE]"][-1])


def test_it_listens_before_the_model_is_loaded_and_leaves_with_0(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, "--served-model-name", "tiny", ready=False) as server:
        refused = server.post("/v1/completions", {"prompt": "hello"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        assert server.get("/ready").status_code == 503
        health = server.get("/health")
        assert (health.status_code, health.json()["state"]) == (200, "loading")
        server.wait_ready()
        assert server.get("/ready").status_code == 200
        assert server.get("/v1/models").json()["data"][0]["id"] == "tiny"
        answer = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        info = server.get("/model_info").json()
        assert info["backends"]
        assert {row["name"] for row in info["quantization"]} >= {"model.norm.weight"}
        assert server.get("/health_generate").status_code == 200
        assert server.is_idle()
        left = server.children()
        assert left
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        eventually(lambda: left & set(processes()), lambda alive: not alive)


def test_a_signal_while_loading_ends_it(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, ready=False) as server:
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_model_that_cannot_be_loaded_is_one_message_and_exit_code_2(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, "--context-length", "100000", ready=False) as server:
        assert server.wait() == 2
        eventually(lambda: server.lines[-1], lambda line: "eightfold: context_length: got 100000; expected at most" in line)
        assert not any("Traceback" in line for line in server.lines)


def test_sigterm_lets_a_stream_end_and_refuses_new_requests(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, *SLOW_NULL) as server, server.client() as client:
        _, lines = begin(server, client, max_tokens=1500)
        server.signal(signal.SIGTERM)
        eventually(lambda: server.get("/ready").status_code, lambda status: status == 503)
        refused = server.post("/v1/completions", {"prompt": "hello"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert server.get("/health").json()["state"] == "draining"
        assert last_event(lines)["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_what_does_not_end_in_time_is_aborted(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, *SLOW_NULL, "--shutdown-timeout", "0.2") as server, server.client() as client:
        _, lines = begin(server, client)
        server.signal(signal.SIGTERM)
        assert last_event(lines)["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0


def test_what_is_paused_is_ended_at_once(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, *SLOW_NULL) as server, server.client() as client:
        _, lines = begin(server, client)
        assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
        eventually(lambda: server.get("/server_info").json()["snapshot"]["is_paused"])
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        error = last_event(lines)["error"]
        assert (error["code"], error["type"]) == ("shutting_down", "server_error")
        assert server.wait() == 0
        assert time.monotonic() - began < 20  # of the 30 seconds that requests have


def test_requests_amid_a_long_step_count_as_waiting(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, "--engine", "null", "--null-step-ms", "4000") as server, server.client() as client:
        with ThreadPoolExecutor(3) as pool:
            asks = [pool.submit(server.post, "/v1/completions", {"prompt": "hello", "max_tokens": 1}) for _ in range(3)]
            eventually(lambda: server.metric("vllm:num_requests_waiting"), lambda count: count == 3, within=3)
            assert client.get("/health").json()["waiting"] == 3
            assert {item.result().status_code for item in asks} == {200}
        eventually(server.is_idle)


def test_a_client_that_takes_nothing_is_dropped_without_an_error_in_the_log(tiny_checkpoint: Path) -> None:
    flags = ("--engine", "null", "--context-length", "300000", "--stream-timeout", "0.3")
    with live_server(tiny_checkpoint, *flags) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            body = json.dumps(ENDLESS).encode()
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            eventually(lambda: any("dropped a client that took nothing" in line for line in server.lines))
            eventually(server.is_idle)
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
    assert not [line for line in server.lines if " ERROR " in line]


def test_probes_need_no_key(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, "--engine", "null", api_key="secret") as server:
        for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert httpx.get(server.url + path, trust_env=False).status_code == status, path


def test_a_second_signal_leaves_at_once(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, *SLOW_NULL) as server, server.client() as client:
        stream = begin(server, client)  # kept, or the client would leave
        left = server.children()
        server.signal(signal.SIGINT)
        eventually(lambda: server.get("/health").json()["state"], lambda state: state == "draining")
        server.signal(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        assert stream[0].status_code == 200
        eventually(lambda: left & set(processes()), lambda alive: not alive)


def test_the_engines_death_ends_every_request_and_the_server(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, *SLOW_NULL) as server, server.client() as client:
        _, lines = begin(server, client)
        whole: list[httpx.Response] = []
        asks = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", ENDLESS | {"stream": False})))
        asks.start()
        eventually(lambda: server.metric("vllm:num_requests_running"), lambda running: running == 2)
        (engine,) = server.children()
        os.kill(engine, signal.SIGKILL)
        assert last_event(lines)["error"]["code"] == "engine_died"
        asks.join(DEADLINE)
        assert (whole[0].status_code, whole[0].json()["error"]["code"]) == (503, "engine_died")
        assert server.wait() == 1


def test_the_engine_does_not_outlive_a_killed_server(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, *SLOW_NULL) as server:
        left = server.children()
        server.signal(signal.SIGKILL)
        server.wait()
        eventually(lambda: left & set(processes()), lambda alive: not alive)


def test_an_engine_that_stands_still_fails_its_health_and_is_ended_by_the_watchdog(tiny_checkpoint: Path) -> None:
    flags = ("--engine", "null", "--null-step-ms", "60000", "--health-stall-seconds", "1", "--watchdog-timeout", "3")
    with live_server(tiny_checkpoint, *flags) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        whole: list[httpx.Response] = []
        asks = threading.Thread(target=lambda: whole.append(server.post("/v1/completions", {"prompt": "hello"})))
        asks.start()
        eventually(lambda: client.get("/health").json()["state"], lambda state: state == "stalled")
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        asks.join(DEADLINE)
        assert whole[0].status_code == 503
        assert server.wait() == 1
        assert any("null_engine.py" in line and "in step" in line for line in server.lines)


def test_a_port_that_is_taken_is_refused(tiny_checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = f"--host and --port: got 127.0.0.1:{port}"
        with pytest.raises(AssertionError, match=wanted), live_server(tiny_checkpoint, "--port", str(port)):
            pass


def test_a_client_that_leaves_frees_its_place(tiny_checkpoint: Path) -> None:
    with live_server(tiny_checkpoint, *SLOW_NULL, "--max-running-requests", "2", "--max-queued-requests", "1") as server:
        with server.client() as client:
            streams = [begin(server, client), begin(server, client)]
            waiting = server.client()
            request = waiting.build_request("POST", "/v1/completions", json=ENDLESS)
            answers: list[httpx.Response] = []
            third = threading.Thread(target=lambda: answers.append(waiting.send(request, stream=True)))
            third.start()
            eventually(lambda: server.metric("vllm:num_requests_waiting"), lambda count: count == 1)
            full = server.post("/v1/completions", {"prompt": "hello"})
            assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
            assert int(full.headers["retry-after"]) >= 1
            for response, _ in streams:
                response.close()
        third.join(DEADLINE)  # the first two are gone, so that it runs
        answers[0].close()
        waiting.close()
        began = time.monotonic()
        eventually(server.is_idle)
        assert time.monotonic() - began < DEADLINE / 2
        reasons = [line for line in server.get("/metrics").text.splitlines() if 'finished_reason="abort"' in line]
        assert float(reasons[0].rpartition(" ")[2]) == 3
        assert server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2}).status_code == 200
