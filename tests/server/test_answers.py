"""Requests of the engine, and pieces of text, whatever the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.answers import Answer, Piece, Prompt, Serving, Usage, encode_text, gathered, make_answers, renamed, serve
from eightfold.server.inprocess import EngineFacts
from eightfold.server.token_stream import RefusedError
from eightfold.types import FinishReason, Grammar, Request, SamplingParams, TokenEvent
from tests import tiny_tokenizer

TOKENIZER = tiny_tokenizer.make()
FACTS = EngineFacts(64, 300, {"temperature": 0.5})


class Stream:
    def __init__(self, batches: list[list[TokenEvent] | Exception]) -> None:
        self._batches = batches
        self.aborted: str | None = None
        self.is_over = False

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        await asyncio.sleep(0)
        if not self._batches:
            await asyncio.Event().wait()
        batch = self._batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        self.is_over = batch[-1].finish_reason is not None
        return batch

    def abort(self, reason: FinishReason = "abort") -> None:
        self.aborted = self.aborted or reason


class Engine:
    """Says what it was told to, in the batches that it was told."""

    def __init__(self, *batches: str | Exception, ends: bool = True) -> None:
        self._batches, self._ends = batches, ends
        self.requests: list[Request] = []
        self.streams: list[Stream] = []
        self.num_reserved = 0

    def reserve(self, count: int) -> None:
        self.num_reserved += count

    def release(self, count: int) -> None:
        self.num_reserved -= count

    def submit(self, request: Request, *, reserved: bool = False) -> Stream:
        self.num_reserved -= reserved
        batches: list[Any] = []
        for number, batch in enumerate(self._batches, 1):
            if isinstance(batch, Exception):
                batches.append(batch)
                continue
            tokens = TOKENIZER.encode(batch, add_special_tokens=False)
            is_last = self._ends and number == len(self._batches)
            reasons: list[FinishReason | None] = [*[None] * (len(tokens) - 1), "length" if is_last else None]
            batches.append(
                [
                    TokenEvent(request.request_id, token, finish_reason=reason)
                    for token, reason in zip(tokens, reasons, strict=True)
                ]
            )
        self.requests.append(request)
        self.streams.append(Stream(batches))
        return self.streams[-1]


def answers(engine: Engine, num_prompts: int = 1, **params: Any) -> list[Answer]:
    serving = Serving(engine, TOKENIZER, FACTS, ["tiny"])
    prompts = [Prompt([5, 6], None, f"prompt[{index}]") for index in range(num_prompts)]
    return make_answers(serving, "id", prompts, SamplingParams(**params))


def served(engine: Engine, asked: list[Answer]) -> list[list[Piece]]:
    async def run() -> list[list[Piece]]:
        return await asyncio.wait_for(gathered(engine, asked), 30)

    return asyncio.run(run())


def texts(pieces: list[list[Piece]]) -> list[list[str]]:
    return [[piece.text for piece in of_it] for of_it in pieces]


def test_tokens_that_came_together_are_one_piece() -> None:
    engine = Engine("hello w", "örld")
    pieces = served(engine, answers(engine))
    assert texts(pieces) == [["hello w", "örld"]]
    assert pieces[0][-1].finish_reason == "length"
    assert len(pieces[0][0].token_ids) == 2


def test_tokens_after_a_stop_text_are_not_told() -> None:
    engine = Engine("a", "bcdef", ends=False)
    asked = answers(engine, stop=("c",))
    (pieces,) = served(engine, asked)
    assert [piece.text for piece in pieces] == ["a", "b"]
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "c")
    assert Usage.of(asked).completion_tokens == 3
    assert engine.streams[0].aborted == "stop"


def test_each_of_several_answers_is_ended_where_its_stop_text_came() -> None:
    engine = Engine("ab", ends=False)
    pieces = served(engine, answers(engine, 2, n=2, stop=("b",)))
    assert texts(pieces) == [["a"]] * 4
    assert [stream.aborted for stream in engine.streams] == ["stop"] * 4


def test_further_answers_wait_for_the_first_ones_prompt() -> None:
    engine = Engine("a", "b")
    asked = answers(engine, 2, n=3)

    async def run() -> None:
        async with aclosing(serve(engine, asked)) as pieces:
            await anext(pieces)
            assert {request.request_id for request in engine.requests[:2]} == {"id-0", "id-3"}
            assert 2 < len(engine.requests) <= 6

    asyncio.run(run())
    assert [answer.index for answer in asked if answer.is_first] == [0, 3]


def test_closing_early_aborts_everything() -> None:
    engine = Engine("a", ends=False)

    async def run(asked: list[Answer]) -> None:
        async with aclosing(serve(engine, asked)) as pieces:
            await anext(pieces)

    for asked in (answers(engine), answers(engine, 3)):
        asyncio.run(run(asked))
    assert len(engine.streams) == 4
    assert all(stream.aborted for stream in engine.streams)


def test_an_error_of_one_answer_ends_all() -> None:
    engine = Engine("a", RuntimeError("a fault"))
    for num_prompts in (1, 3):
        with pytest.raises(RuntimeError, match="a fault"):
            served(engine, answers(engine, num_prompts))
    assert all(stream.aborted for stream in engine.streams)


def test_an_engine_that_takes_no_more_ends_what_it_took() -> None:
    class Full(Engine):
        def submit(self, request: Request, *, reserved: bool = False) -> Stream:
            if len(self.requests) == 2:
                self.num_reserved -= reserved
                raise InputError("queue", got="2 requests", expected="fewer")
            return super().submit(request, reserved=reserved)

    engine = Full("a", ends=False)
    with pytest.raises(InputError, match="queue"):
        served(engine, answers(engine, 4))
    assert [stream.aborted for stream in engine.streams] == ["abort", "abort"]
    assert engine.num_reserved == 0


def test_a_body_has_places_for_all_of_its_answers_or_none() -> None:
    class Narrow(Engine):
        def reserve(self, count: int) -> None:
            if count > 5:
                raise RefusedError("the queue", got="1 request", expected="fewer", kind="queue_full")
            super().reserve(count)

    engine = Narrow("ab", "c")
    assert texts(served(engine, answers(engine, n=3))) == [["ab", "c"]] * 3
    assert engine.num_reserved == 0
    for asked in (answers(engine, 2, n=3), answers(engine, 6)):
        with pytest.raises(RefusedError):
            served(engine, asked)
    assert len(engine.requests) == 3


@pytest.mark.parametrize(("num_prompts", "n", "what"), [(1, 9, "n"), (9, 1, "prompt"), (3, 3, "n")])
def test_a_body_that_can_never_have_its_places_is_refused(num_prompts: int, n: int, what: str) -> None:
    serving = Serving(Engine(), TOKENIZER, FACTS, ["tiny"], num_places=8)
    prompts = [Prompt([5, 6], None, f"prompt[{index}]") for index in range(num_prompts)]
    with pytest.raises(InputError, match="at most 8 in all, which --max-running-requests and --max-queued") as caught:
        make_answers(serving, "id", prompts, SamplingParams(n=n))
    assert (type(caught.value), caught.value.what) == (InputError, what)


def test_a_grammar_that_cannot_be_kept_is_an_error_of_its_field(caplog: pytest.LogCaptureFixture) -> None:
    (answer,) = answers(Engine("a"), grammar=Grammar("regex", "a", name="guided_regex"))
    answer.take([TokenEvent("id-0", 5)])
    with pytest.raises(InputError, match="guided_regex: got after 1 tokens of the answer a limit; expected one that can be"):
        answer.take([TokenEvent("id-0", None, finish_reason="abort", failure="a limit")])
    assert "id-0 ended after 1 tokens: a limit" in caplog.text


def test_requests_have_ids_seeds_and_defaults_of_their_own() -> None:
    asked = answers(Engine("a"), 2, n=2)
    assert [answer.request.request_id for answer in asked] == ["id-0", "id-1", "id-2", "id-3"]
    assert len({answer.request.seed for answer in asked}) == 4
    assert {answer.request.params.temperature for answer in asked} == {0.5}


def test_errors_name_the_prompt_at_fault() -> None:
    serving = Serving(Engine(), TOKENIZER, FACTS, ["tiny"])
    prompts = [Prompt([5], None, "prompt[0]"), Prompt([5] * 64, None, "prompt[1]")]
    with pytest.raises(InputError, match=r"prompt\[1\]: got 64 tokens; expected at most 63"):
        make_answers(serving, "id", prompts, SamplingParams())


def test_texts_are_tokenized_and_hopeless_ones_are_not() -> None:
    async def encoded(text: str) -> list[int]:
        return await encode_text(TOKENIZER, text, EngineFacts(4096, 300, {}), "prompt")

    assert asyncio.run(encoded("hello")) == TOKENIZER.encode("hello")
    assert asyncio.run(encoded("a" * 5000)) == TOKENIZER.encode("a" * 5000)
    with pytest.raises(InputError, match="got 100000 characters; expected at most"):
        asyncio.run(encoded("a" * 100_000))
    with pytest.raises(InputError, match="prompt: got '\\\\ud800'"):
        asyncio.run(encoded("\ud800"))


def test_errors_are_renamed_where_they_have_another_name() -> None:
    error = InputError("a", got=1, expected="2", remedy="Three.")
    assert renamed(error, b="c") is error
    assert str(renamed(error, a="c")) == "c: got 1; expected 2. Three."
