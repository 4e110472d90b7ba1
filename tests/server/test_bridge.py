"""The client of an engine in another process, over the null engine and over one that goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.bridge import EngineClient
from eightfold.server.process import EngineProcess
from eightfold.server.token_stream import EngineDiedError, RefusedError
from eightfold.types import Request, SamplingParams, TokenEvent
from tests.server.live import DEADLINE

NULL, BROKEN = "eightfold.server.null_engine", "tests.server.children"
# Room for answers that do not end by themselves within a test.
ENDLESS = {"context_length": 10**6, "max_total_tokens": 4 * 10**6}

Conversation = Callable[[EngineClient], Awaitable[None]]


def ask(name: str = "a-0", *, max_tokens: int = 3, prompt: tuple[int, ...] = (5, 6)) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), 0)


async def all_of(client: EngineClient, request: Request) -> list[TokenEvent]:
    return [event async for events in client.submit(request) for event in events]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def talk(conversation: Conversation, module: str, options: dict[str, Any], **more: Any) -> None:
    """Run a conversation with an engine in a process of its own."""

    async def run(process: EngineProcess) -> None:
        client = EngineClient(process, options, **more)
        await client.start()
        try:
            async with asyncio.timeout(DEADLINE):
                await conversation(client)
        finally:
            await client.close()

    with EngineProcess(module) as process:
        asyncio.run(run(process))


def test_requests_are_answered_and_counted(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        model = await client.loaded()
        assert (model.model_path, model.vocab_size, model.max_running_requests) == (str(tiny_checkpoint), 300, 2)
        answers = await asyncio.gather(*(all_of(client, ask(f"{name}-0")) for name in "abcd"))
        for name, events in zip("abcd", answers, strict=True):
            assert [event.request_id for event in events] == [f"{name}-0"] * 3
            assert [event.token_id for event in events] == [5, 6, 5]
            assert events[-1].finish_reason == "length"
        assert client.num_open == 0
        await until(lambda: client.snapshot.generated_tokens == 12 and client.snapshot.running == 0)
        assert client.finished == {"length": 4}
        recorder = client.recorder
        counts = [sum(item.counts) for item in (recorder.queue, recorder.time_to_first_token, recorder.inter_token)]
        assert counts == [4, 4, 8]
        assert client.silent_seconds < DEADLINE

    talk(conversation, NULL, {"model": str(tiny_checkpoint), "max_running_requests": 2})


def test_aborts_free_what_they_held(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        left = client.submit(ask("left-0", max_tokens=10**6))
        await anext(left)
        left.abort("stop")
        told = client.submit(ask("told-0", max_tokens=10**6))
        other = client.submit(ask("toldother-0", max_tokens=10**6))
        await anext(told)
        assert client.abort("told") == 1
        assert client.abort("nobody") == 0
        events = [event async for news in told for event in news]
        assert events[-1].finish_reason == "abort"
        assert client.abort_all() == 1
        assert [event async for news in other for event in news][-1].finish_reason == "abort"
        assert client.finished == {"stop": 1, "abort": 2}
        await until(lambda: client.snapshot.running == 0 and client.snapshot.free_blocks == client.snapshot.num_blocks)
        assert await client.control("check") == {}

    talk(conversation, NULL, ENDLESS | {"model": str(tiny_checkpoint)}, null_step_seconds=0.001)


def test_refusals(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        with pytest.raises(RefusedError, match=r"prompt: got 64 tokens; expected at most 63") as too_long:
            await all_of(client, ask(prompt=(5,) * 64))
        assert too_long.value.kind == "invalid"
        running = [client.submit(ask(f"{name}-0", max_tokens=60)) for name in "abc"]
        with pytest.raises(RefusedError, match="rid: got a; expected one that is not in use"):
            client.submit(ask("a-0"))
        extra = client.submit(ask("d-0"))
        with pytest.raises(RefusedError, match=r"the queue: got 4 requests .* one place asked for; expected at most 4") as full:
            client.submit(ask("e-0"))
        assert full.value.kind == "queue_full"
        running[0].abort()
        await all_of(client, ask("e-0"))  # there is room again
        assert [event async for news in extra for event in news][-1].finish_reason == "length"
        with pytest.raises(InputError, match="command: got nonsense"):
            await client.control("nonsense")

    options = {"model": str(tiny_checkpoint), "max_running_requests": 3, "context_length": 64}
    talk(conversation, NULL, options, null_step_seconds=0.01, max_queued_requests=1)


def test_what_cannot_be_sent_takes_no_place(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        for bad in (ask(prompt=(2**64,)), ask("\ud800-0")):
            with pytest.raises((OverflowError, UnicodeEncodeError)):
                client.submit(bad)
        with pytest.raises(OverflowError):
            await client.control("check", number=2**64)
        assert (client.num_open, client.num_waiting) == (0, 0)
        assert len(await all_of(client, ask())) == 3
        assert client.silent_seconds < DEADLINE
        assert not client._controls

    options = {"model": str(tiny_checkpoint), "max_running_requests": 1}
    talk(conversation, NULL, options, max_queued_requests=0)


def test_places_are_kept_until_they_are_used_or_given_back(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        client.reserve(2)
        with pytest.raises(RefusedError, match="got 2 requests that are not done, and 2 places asked for; expected at most 3"):
            client.reserve(2)
        stream = client.submit(ask("a-0", max_tokens=10**6), reserved=True)
        assert client.num_waiting == 1  # though the engine has not heard of it yet
        client.submit(ask("b-0"))
        with pytest.raises(RefusedError):
            client.submit(ask("c-0"))
        client.release(1)
        await all_of(client, ask("c-0"))
        error = RuntimeError("the end")
        assert client.fail_all(error) >= 1
        with pytest.raises(RuntimeError, match="the end"):
            await read_all(stream)
        assert client.num_open == 0
        await until(lambda: client.snapshot.running == 0)

    options = ENDLESS | {"model": str(tiny_checkpoint), "max_running_requests": 2}
    talk(conversation, NULL, options, null_step_seconds=0.001, max_queued_requests=1)


def test_an_interval_makes_pieces_of_several_tokens(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        pieces = [len(events) async for events in client.submit(ask(max_tokens=12))]
        assert pieces == [1, 5, 5, 1]

    talk(conversation, NULL, {"model": str(tiny_checkpoint)}, null_step_seconds=0.01, stream_interval=5)


async def read_all(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


def test_closing_ends_what_is_open(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        stream = client.submit(ask(max_tokens=10**6))
        await anext(stream)
        await client.close()
        with pytest.raises(EngineDiedError, match="the server leaves"):
            await read_all(stream)
        with pytest.raises(EngineDiedError):
            client.submit(ask("b-0"))
        with pytest.raises(EngineDiedError):
            await client.control("check")

    talk(conversation, NULL, ENDLESS | {"model": str(tiny_checkpoint)}, null_step_seconds=0.001)


def test_a_step_that_breaks_ends_every_stream_and_command(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        streams = [client.submit(ask(f"{name}-0")) for name in "ab"]
        for stream in streams:
            with pytest.raises(EngineDiedError, match="the engine broke: RuntimeError: a kernel failed"):
                await anext(stream)
        failure = await client.died()
        assert "a kernel failed" in failure.message
        assert failure.refusal is None
        assert (client.state, client.num_open) == ("dead", 0)

    talk(conversation, BROKEN, {"model": str(tiny_checkpoint)})
    assert "RuntimeError: a kernel failed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("revision", "words"),
    [
        ("breaks while it loads", "the engine broke: RuntimeError: no memory"),
        ("exits", "the engine broke: SystemExit: 3"),
        ("is killed", "the engine's process ended with code -9"),
    ],
)
def test_a_process_that_ends_while_it_loads_says_why(tiny_checkpoint: Path, revision: str, words: str) -> None:
    async def conversation(client: EngineClient) -> None:
        with pytest.raises(EngineDiedError, match=words):
            await client.loaded()
        assert client.failure is not None
        assert client.failure.refusal is None

    talk(conversation, BROKEN, {"model": str(tiny_checkpoint), "revision": revision})


def test_an_input_that_is_to_blame_comes_back_as_it_was(tmp_path: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        with pytest.raises(EngineDiedError):
            await client.loaded()
        assert client.failure is not None
        assert client.failure.refusal is not None
        assert str(client.failure.refusal.error()).startswith(f"model: got '{tmp_path}/nowhere'")

    talk(conversation, NULL, {"model": f"{tmp_path}/nowhere"})


def test_progress_is_passed_on(tiny_checkpoint: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    async def conversation(client: EngineClient) -> None:
        await client.loaded()
        assert client.progress == ("load", 5, 5)

    def report(phase: str, done: int, total: int) -> None:
        seen.append((phase, done, total))

    talk(conversation, BROKEN, {"model": str(tiny_checkpoint), "revision": "reports"}, on_progress=report)
    assert seen[-1] == ("load", 5, 5)


def test_a_process_that_hangs_is_ended(tiny_checkpoint: Path) -> None:
    async def conversation(client: EngineClient) -> None:
        await client.close(patience=0.1)

    talk(conversation, BROKEN, {"model": str(tiny_checkpoint), "revision": "hangs"})
