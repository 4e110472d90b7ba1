"""An engine of this process behind the interface of one in another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.llm import LLM
from eightfold.server.inprocess import InProcessEngine, InProcessStream, serving_in_process
from eightfold.types import SamplingParams, TokenEvent
from tests.pretended import CONTEXT_LENGTH, VOCAB_SIZE, PretendedRunner, check_idle, counting, make_llm, saying


async def all_of(stream: InProcessStream) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while not events or events[-1].finish_reason is None:
        events.extend(await anext(stream))
    return events


def run(llm: LLM, conversation: Callable[[InProcessEngine], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        engine = InProcessEngine(llm.engine)
        result = await asyncio.wait_for(conversation(engine), 60)
        await asyncio.wait_for(engine.idle(), 60)
        return result

    result = asyncio.run(body())
    check_idle(llm)
    return result


def request(llm: LLM, name: str, **params: Any) -> Any:
    return llm.engine.make_request(name, [5, 6], SamplingParams(**params))


def test_requests_run_together_and_each_gets_its_events() -> None:
    llm = make_llm(counting())

    async def conversation(engine: InProcessEngine) -> list[list[TokenEvent]]:
        streams = [engine.submit(request(llm, str(index), max_tokens=4, seed=index)) for index in range(3)]
        return await asyncio.gather(*(all_of(stream) for stream in streams))

    answers = run(llm, conversation)
    first = answers[0][0].token_id
    assert [[event.token_id - first for event in events] for events in answers] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    assert isinstance(llm.engine.runner, PretendedRunner)
    assert max(len(batch.chunks) for batch in llm.engine.runner.batches) == 3


def test_an_aborted_request_gives_its_blocks_back() -> None:
    llm = make_llm(counting())

    async def conversation(engine: InProcessEngine) -> None:
        stream = engine.submit(request(llm, "a", max_tokens=50))
        await anext(stream)
        stream.abort()
        stream.abort()

    run(llm, conversation)
    assert llm.engine.scheduler.counters.finished == {"abort": 1}


def test_what_the_engine_refuses_its_stream_raises() -> None:
    llm = make_llm(saying("x"))

    async def conversation(engine: InProcessEngine) -> None:
        llm.engine.add(request(llm, "a"))
        refused = engine.submit(request(llm, "a"))
        with pytest.raises(InputError, match="request_id"):
            await anext(refused)

    run(llm, conversation)


def test_an_engine_that_breaks_ends_every_stream() -> None:
    def broken(sequence: Any) -> int:
        raise ZeroDivisionError("a fault")

    llm = make_llm(broken)

    async def conversation() -> None:
        engine = InProcessEngine(llm.engine)
        streams = [engine.submit(request(llm, str(index))) for index in range(2)]
        for stream in streams:
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(anext(stream), 60)

    asyncio.run(conversation())


def test_it_knows_its_model() -> None:
    llm = make_llm(saying("x"))
    serving = serving_in_process(llm.engine, llm.tokenizer, ["a"])
    assert (serving.facts.context_length, serving.facts.vocab_size) == (CONTEXT_LENGTH, VOCAB_SIZE)
    assert serving.facts.sampling_defaults == {}
    assert serving.names == ["a"]
