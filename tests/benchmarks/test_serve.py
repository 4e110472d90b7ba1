"""The load generator against a server that says what it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from eightfold.benchmarks import serve
from eightfold.benchmarks.serve import Run, Workload
from eightfold.benchmarks.traffic import CONVERSATIONS, Fixed, Mix
from eightfold.errors import InputError
from tests.openai_stub import Plan, Request, Stub, stub_server

TEXT = " ".join(f"word{number}" for number in range(500))
SHORT = Mix(Fixed(40), Fixed(3))


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_server() as server:
        yield server


def measure(stub: Stub, **options: Any) -> Run:
    given: dict[str, Any] = {"num_prompts": 4, "num_warmups": 0, "mix": SHORT, "timeout": 10.0}
    return serve.run(Workload(stub.url, **given | options), TEXT)


def streams(stub: Stub) -> list[Request]:
    return [request for request in stub.requests if request.body.get("stream")]


@pytest.mark.parametrize("backend", ["openai-chat", "openai-completions"])
def test_a_run_counts_what_the_server_counts(stub: Stub, backend: serve.Backend) -> None:
    stub.plan = lambda request: Plan(usage={"completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}})
    run = measure(stub, backend=backend, num_warmups=2, max_concurrency=2)
    assert len(run.answers) == 4
    assert len(streams(stub)) == 6
    assert all(request.path == serve.ROUTES[backend] for request in streams(stub))
    found = serve.result(Workload(stub.url, backend=backend), run)
    assert found["completed"] == 4
    assert found["tokens_per_frame"] == 2.0
    assert found["total_cached_tokens"] == 8
    assert found["model_id"] == "stub"
    assert found["max_concurrent_requests"] <= 2
    # Lengths are met without a tokenizer, whatever the template adds.
    assert all(abs(answer.prompt_tokens - 40) <= 1 for answer in run.answers)
    json.dumps(found, allow_nan=False)


def test_a_request_says_what_the_workload_says(stub: Stub) -> None:
    measure(stub, api_key="secret", temperature=0.5, extra_body={"top_k": 7}, model="given")
    assert {request.headers["authorization"] for request in stub.requests} == {"Bearer secret"}
    assert "/v1/models" not in {request.path for request in stub.requests}
    body = dict(streams(stub)[0].body)
    assert body.pop("messages")[0]["content"].startswith("word")
    assert body == {
        "model": "given",
        "max_tokens": 3,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 7,
    }
    measure(stub, ignore_eos=False)
    assert "ignore_eos" not in streams(stub)[-1].body


def test_a_seed_repeats_a_run(stub: Stub) -> None:
    for seed in (3, 3, 4):
        measure(stub, seed=seed, max_concurrency=1)
    contents = [json.dumps(request.body["messages"]) for request in streams(stub)]
    assert contents[:4] == contents[4:8]
    assert set(contents[:4]).isdisjoint(contents[8:])


def test_requests_come_when_they_are_due(stub: Stub) -> None:
    run = measure(stub, request_rate=200.0, num_prompts=40)
    sent = sorted(answer.sent - run.start for answer in run.answers)
    assert sent[-1] > 0.05
    assert all(answer.sent >= answer.scheduled for answer in run.answers)


@pytest.mark.parametrize(
    ("plan", "kind", "detail"),
    [
        (Plan(status=429, message="the queue is full"), "http 429", "the queue is full"),
        (Plan(status=503, message="loading"), "http 503", "loading"),
        (Plan(breaks_after=2), "connection closed", "the server closed the connection in the middle of a response"),
        (Plan(message="the engine died"), "error event", "the engine died"),
        (Plan(has_end=False), "no end", "the stream ended without [DONE]"),
        (Plan(has_end=False, chunked=False), "no end", "the stream ended without [DONE]"),
        (Plan(usage=None), "no usage", "the stream has no chunk with usage"),
        (Plan(tokens=()), "no text", "finish_reason length, and no text"),
        (Plan(raw=("{broken",)), "broken frame", "{broken"),
        (Plan(raw=("[1, 2]",)), "broken frame", "[1, 2]"),
    ],
)
def test_each_failure_is_counted_by_its_kind(stub: Stub, plan: Plan, kind: str, detail: str) -> None:
    count = iter(range(100))
    stub.plan = lambda request: plan if request.body.get("stream") and next(count) % 2 else Plan()
    run = measure(stub, max_concurrency=1)
    found = serve.result(Workload(stub.url), run)
    assert (found["completed"], found["failed"], found["errors"]) == (2, 2, {kind: 2})
    assert {answer.detail for answer in run.answers if answer.error} == {detail}
    stub.plan = lambda request: plan if request.body.get("stream") else Plan()
    with pytest.raises(InputError, match=f"the first request: got {kind}"):
        measure(stub, num_warmups=1)


def test_a_stream_that_hangs_is_a_timeout_and_the_server_sees_it_leave(stub: Stub) -> None:
    never = threading.Event()
    stub.plan = lambda request: Plan(wait=never)
    run = measure(stub, num_prompts=1, timeout=0.2)
    assert (run.answers[0].error, run.answers[0].detail) == ("timeout", "no end after 0.2 s")
    assert stub.dropped.wait(5)


def test_a_server_that_goes_away_is_no_connection(stub: Stub) -> None:
    async def run() -> Run:
        workload = Workload(stub.url, num_prompts=2, num_warmups=0, mix=SHORT, request_rate=0.5)
        task = asyncio.create_task(serve.measure(workload, TEXT))
        while len(streams(stub)) < 1:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(stub.close)
        return await task

    answers = sorted(asyncio.run(run()).answers, key=lambda answer: answer.sent)
    assert answers[1].error in ("no connection", "connection closed")


def test_an_interrupted_run_keeps_what_it_has(stub: Stub) -> None:
    gate = threading.Event()
    count = iter(range(100))
    stub.plan = lambda request: Plan(wait=gate if request.body.get("stream") and next(count) >= 3 else None)

    async def run() -> Run:
        ended = asyncio.Event()
        workload = Workload(stub.url, num_prompts=20, num_warmups=0, mix=SHORT, max_concurrency=2)
        task = asyncio.create_task(serve.measure(workload, TEXT, progress=lambda done: ended.set() if done == 3 else None))
        await asyncio.wait_for(ended.wait(), 10)
        while len(streams(stub)) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        return await task

    found = asyncio.run(run())
    assert (len(found.answers), found.unfinished, found.interrupted) == (3, 2, True)
    assert found.duration > 0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(status=401, message="wrong key"), "/v1/chat/completions: got 401: wrong key; expected 200"),
        (Plan(status=400, message="unknown field ignore_eos"), "expected 200. Give --no-ignore-eos."),
        (Plan(usage=None), "usage: got null; expected the tokens of the prompt in each response"),
    ],
)
def test_a_server_that_refuses_the_first_request_ends_the_run(stub: Stub, plan: Plan, message: str) -> None:
    stub.plan = lambda request: plan
    with pytest.raises(InputError) as error:
        measure(stub)
    assert message in str(error.value)


def test_a_server_that_lists_no_model_asks_for_one(stub: Stub) -> None:
    stub.pages["/v1/models"] = ("application/json", {}, '{"data": []}')
    with pytest.raises(InputError, match=r"/v1/models: got .* expected a list of models. Give --model"):
        measure(stub)
    stub.pages["/v1/models"] = ("text/html", {}, "<p>hello")
    with pytest.raises(InputError, match="/v1/models: got <p>hello; expected JSON"):
        measure(stub)
    stub.pages["/v1/models"] = ("application/json", {}, "[]")
    with pytest.raises(InputError, match=r"/v1/models: got \[\]; expected a JSON object"):
        measure(stub)


def test_no_server_is_said() -> None:
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:9/v1/models: got .*; expected a server that listens"):
        serve.run(Workload("http://127.0.0.1:9/v1"), TEXT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "openai"}, "--backend: got openai; expected openai-chat or openai-completions"),
        ({"num_prompts": 0}, "--num-prompts: got 0; expected at least 1"),
        ({"max_concurrency": 0}, "--max-concurrency: got 0; expected at least 1"),
        ({"num_warmups": -1}, "--num-warmups: got -1; expected at least 0"),
        ({"request_rate": 0.0}, "--request-rate: got 0.0; expected more than 0"),
        ({"request_rate": float("nan")}, "--request-rate: got nan; expected more than 0"),
        ({"timeout": -1.0}, "--timeout: got -1.0; expected more than 0"),
    ],
)
def test_a_workload_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Workload("http://a", **options)
    assert str(error.value) == message


def test_lengths_are_conversations_or_fixed() -> None:
    assert serve.lengths(None, None) == CONVERSATIONS
    assert serve.lengths(5, None) == Mix(Fixed(5), CONVERSATIONS.output)
    with pytest.raises(InputError, match="--output-len: got 0; expected at least 1"):
        serve.lengths(5, 0)
