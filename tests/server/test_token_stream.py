"""A stream of token events, as its reader and its client see it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.token_stream import AnswerStream, EngineDiedError, RefusedError
from eightfold.types import FinishReason, Request, SamplingParams, TokenEvent

REQUEST = Request("a", (1, 2), SamplingParams(max_tokens=9), 0)


def event(token_id: int, finish_reason: FinishReason | None = None) -> TokenEvent:
    return TokenEvent("a", token_id, finish_reason=finish_reason)


def with_stream(conversation: Callable[[AnswerStream, list[Any]], Awaitable[None]], interval: int = 1) -> None:
    """Run a conversation over a stream and the list of those that were dropped, with their reasons."""
    dropped: list[Any] = []

    async def run() -> None:
        stream = AnswerStream(REQUEST, interval, lambda stream, reason: dropped.append((stream.request_id, reason)))
        await asyncio.wait_for(conversation(stream, dropped), 10)

    asyncio.run(run())


async def ids(stream: AnswerStream) -> list[int | None]:
    return [item.token_id for item in await anext(stream)]


def test_a_slow_reader_gets_all_at_once() -> None:
    async def conversation(stream: AnswerStream, dropped: list[Any]) -> None:
        for token in (1, 2, 3):
            stream.put(event(token))
        assert await ids(stream) == [1, 2, 3]
        stream.put(event(4, "length"))
        assert await ids(stream) == [4]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert dropped == []

    with_stream(conversation)


def test_a_reader_that_waits_is_woken() -> None:
    async def conversation(stream: AnswerStream, dropped: list[Any]) -> None:
        reader = asyncio.create_task(ids(stream))
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(event(1))
        assert await reader == [1]

    with_stream(conversation)


def test_an_interval_holds_back_all_but_the_first_and_the_last() -> None:
    async def conversation(stream: AnswerStream, dropped: list[Any]) -> None:
        stream.put(event(1))
        assert await ids(stream) == [1]
        reader = asyncio.create_task(ids(stream))
        for token in (2, 3):
            stream.put(event(token))
            await asyncio.sleep(0)
            assert not reader.done()
        stream.put(event(4))
        assert await reader == [2, 3, 4]
        stream.put(event(5, "stop"))
        assert await ids(stream) == [5]

    with_stream(conversation, interval=3)


def test_an_abort_tells_the_client_once_and_ends_the_reader() -> None:
    async def conversation(stream: AnswerStream, dropped: list[Any]) -> None:
        stream.put(event(1))
        stream.abort("stop")
        stream.abort()
        assert dropped == [("a", "stop")]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    with_stream(conversation)


def test_an_abort_wakes_a_reader_that_waits() -> None:
    async def conversation(stream: AnswerStream, dropped: list[Any]) -> None:
        reader = asyncio.create_task(ids(stream))
        await asyncio.sleep(0)
        stream.abort()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await asyncio.gather(reader, return_exceptions=True)

    with_stream(conversation)


def test_an_error_comes_after_the_events_that_came_before_it() -> None:
    async def conversation(stream: AnswerStream, dropped: list[Any]) -> None:
        stream.put(event(1))
        stream.end(EngineDiedError("gone"))
        assert await ids(stream) == [1]
        with pytest.raises(EngineDiedError, match="gone"):
            await anext(stream)
        stream.abort()
        assert dropped == []  # it is over already

    with_stream(conversation)


def test_a_refusal_is_an_input_error_with_a_kind() -> None:
    error = RefusedError("the queue", got=9, expected="fewer", kind="queue_full")
    assert isinstance(error, InputError)
    assert (error.kind, error.what) == ("queue_full", "the queue")
    assert RefusedError("prompt", got=9, expected="fewer").kind == "invalid"
