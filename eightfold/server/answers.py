"""From prompts to requests of the engine, and from its token events to pieces of text.

This is what all generation endpoints share. It knows no HTTP, and of the engine no more than that it takes requests and gives
events: a server's engine in another process and one in this process serve alike.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from eightfold.detokenizer import Detokenizer
from eightfold.errors import InputError
from eightfold.requests import PromptTooLongError, make_request, params_of_answers
from eightfold.server.protocol import UnknownModelError
from eightfold.text import Tokenizer
from eightfold.types import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs

logger = logging.getLogger(__name__)

MAX_ANSWERS = 4096
"""Most answers that one request may ask for: its prompts times `n`."""

# Tokenizing a shorter text takes less than handing it to a thread.
_SHORT_TEXT = 4096


class AnswerStream(Protocol):
    """The events of one request of the engine. The last one has a `finish_reason`."""

    def __aiter__(self) -> AsyncIterator[list[TokenEvent]]: ...

    async def __anext__(self) -> list[TokenEvent]:
        """All events that arrived since the last call, at least one."""

    def abort(self, reason: FinishReason = "abort") -> None:
        """End the request where it still goes on; the reason is what its end counts as."""


class Submits(Protocol):
    """An engine, wherever it is."""

    def reserve(self, count: int) -> None:
        """Keep places in the queue."""

    def release(self, count: int) -> None:
        """Give back places that were kept and not used."""

    def submit(self, request: Request, *, reserved: bool = False) -> AnswerStream:
        """Queue a request, in a place of its own or in one that was kept."""


class ModelFacts(Protocol):
    """What is known of the model that answers."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Values for what a request leaves open."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What an endpoint answers with.

    Attributes:
        engine: takes the requests.
        tokenizer: the model's.
        facts: of the model.
        names: what requests may call the model; answers call it by the first.
        reasoning: the format in which the model marks its reasoning; None where it has none.
        tools: the format in which it writes tool calls; None where it is not known.
        num_places: answers that the engine and its queue have room for, so that no body may ask for more.
    """

    engine: Submits
    tokenizer: Tokenizer
    facts: ModelFacts
    names: Sequence[str]
    reasoning: str | None = None
    tools: str | None = None
    num_places: int = MAX_ANSWERS


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt, and what was learned of it.

    Attributes:
        token_ids: as the model sees it.
        text: as it was given; None where it was given as token ids.
        field: its place in the body, for errors.
        logprobs: one for each token but the first, where asked for, once the first token of an answer is there.
        num_cached_tokens: how many of its tokens the prefix cache supplied to its first answer.
    """

    token_ids: Sequence[int]
    text: str | None
    field: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """News about one answer. Its last one has a `finish_reason`.

    Attributes:
        answer: whose it is.
        text: the text that became certain; may be empty.
        token_ids: the new tokens.
        logprobs: one for each new token, where asked for; else empty.
        offsets: where in the answer's text each of `logprobs` begins.
        finish_reason: why the answer ended; None while it goes on.
        stop_reason: the stop text, or the id of the token, that ended it; None where neither did.
    """

    answer: Answer
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    offsets: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(slots=True, eq=False)
class Answer:
    """One answer on its way.

    Attributes:
        prompt: what it answers.
        request: what the engine is asked.
        index: its place among all answers of the body.
        detokenizer: makes its text.
        is_first: whether it is its prompt's first answer, which tells about the prompt.
        is_hidden: nothing of it is told: the prompt's log probabilities alone are wanted.
        followers: answers to the same prompt, which start when its prompt is in the cache.
        num_tokens: generated so far.
    """

    prompt: Prompt
    request: Request
    index: int
    detokenizer: Detokenizer
    is_first: bool
    is_hidden: bool = False
    followers: Sequence[Answer] = field(default_factory=list)
    num_tokens: int = 0

    def take(self, events: Sequence[TokenEvent]) -> Piece:
        """The piece that new events make. Where a stop text was found the engine still works on the request.

        Raises:
            InputError: the answer's grammar could not be kept to the end.
        """
        if self.is_first and self.num_tokens == 0:
            self.prompt.num_cached_tokens = events[0].num_cached_tokens
            self.prompt.logprobs = events[0].prompt_logprobs
        if self.is_hidden:
            reason = events[-1].finish_reason
            return Piece(self, "", (), (), (), "length" if reason == "stop" else reason, None)
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        offsets: list[int] = []
        for event in events:
            offset = self.detokenizer.num_characters
            news = self.detokenizer.take(event)
            texts.append(news.text)
            token_ids.extend(news.token_ids)
            if news.logprobs:
                logprobs.extend(news.logprobs)
                offsets.append(offset)
            if news.finish_reason is not None:
                break
        self.num_tokens += len(token_ids)
        grammar = self.request.params.grammar
        if news.failure and grammar is not None:
            logger.warning("%s ended after %d tokens: %s", self.request.request_id, self.num_tokens, news.failure)
            raise InputError(
                grammar.name,
                got=f"after {self.num_tokens} tokens of the answer {news.failure}",
                expected="one that can be kept to the answer's end",
                remedy="Smaller counts of repetition and fewer alternatives make a grammar simpler.",
            )
        return Piece(
            self, "".join(texts), tuple(token_ids), tuple(logprobs), tuple(offsets), news.finish_reason, news.stop_reason
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole body, its prompts counted once each."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Usage:
        """What answers have cost so far."""
        prompts = [answer.prompt for answer in answers if answer.is_first]
        return cls(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            completion_tokens=sum(answer.num_tokens for answer in answers),
            cached_tokens=sum(prompt.num_cached_tokens for prompt in prompts),
        )

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's words."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def served_name(serving: Serving, asked: str | None) -> str:
    """What an answer calls the model.

    Raises:
        UnknownModelError: another model was asked for.
    """
    if asked is not None and asked not in serving.names:
        raise UnknownModelError("model", got=repr(asked), expected=f"{' or '.join(serving.names)}, or nothing")
    return asked or serving.names[0]


async def encode_text(
    tokenizer: Tokenizer, text: str, facts: ModelFacts, name: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text, made in a thread where that takes long.

    Raises:
        PromptTooLongError: a text that is far too long to be tokenized at all.
        InputError: half of a surrogate pair. Both are named `name`.
    """
    longest = facts.context_length * tokenizer.longest_token
    if len(text) > longest:
        raise PromptTooLongError(
            name,
            got=f"{len(text)} characters",
            expected=f"at most {longest}: no longer text can be within context_length {facts.context_length}",
        )
    try:
        encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return encode() if len(text) <= _SHORT_TEXT else await asyncio.to_thread(encode)
    except InputError as error:
        raise renamed(error, prompt=name) from error


def make_answers(
    serving: Serving,
    request_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    hidden: bool = False,
    shown: frozenset[int] = frozenset(),
) -> list[Answer]:
    """The answers to ask the engine for, in the order of prompts; nothing is queued yet.

    Args:
        serving: the tokenizer and the facts of the model.
        request_id: the beginning of the ids of the engine's requests; not used before.
        prompts: what to answer.
        params: with `n`.
        hidden: whether only the prompts are of interest.
        shown: special tokens that give their text in any case.

    Raises:
        InputError: a prompt or a parameter that the model cannot take. `what` is the field.
    """
    each = params_of_answers(params)
    if len(prompts) * len(each) > (most := min(MAX_ANSWERS, serving.num_places)):
        what = "n" if len(each) > 1 else prompts[0].field.partition("[")[0]
        expected = f"at most {most} in all"
        if most < MAX_ANSWERS:
            expected += ", which --max-running-requests and --max-queued-requests have room for"
        got = f"{len(prompts)} prompts" if len(each) == 1 else f"{len(each)} answers for each of {len(prompts)} prompts"
        raise InputError(what, got=got, expected=expected)
    answers: list[Answer] = []
    for prompt in prompts:
        first: Answer | None = None
        for own in each:
            index = len(answers)
            try:
                request = make_request(
                    f"{request_id}-{index}",
                    prompt.token_ids,
                    own,
                    context_length=serving.facts.context_length,
                    vocab_size=serving.facts.vocab_size,
                    sampling_defaults=serving.facts.sampling_defaults,
                    seed=random.getrandbits(64),
                )
            except InputError as error:
                names = {"prompt": prompt.field, "prompt token id": prompt.field}
                raise renamed(error, **names) from error
            answer = Answer(prompt, request, index, Detokenizer(serving.tokenizer, request, shown=shown), first is None, hidden)
            answers.append(answer)
            if first is None:
                first = answer
            else:
                first.followers = [*first.followers, answer]
    return answers


def renamed(error: InputError, **names: str) -> InputError:
    """An error that names the field of the body instead of our own word for it."""
    if error.what not in names:
        return error
    return type(error)(names[error.what], got=error.got, expected=error.expected, remedy=error.remedy)


def serve(engine: Submits, answers: Sequence[Answer]) -> AsyncGenerator[Piece, None]:
    """The pieces of answers as they come; closing this early ends them all.

    Raises:
        Exception: whatever the engine's streams raise. All answers are aborted then.
    """
    return _serve_one(engine, answers[0]) if len(answers) == 1 else _serve_several(engine, answers)


async def _serve_one(engine: Submits, answer: Answer) -> AsyncGenerator[Piece, None]:
    stream = engine.submit(answer.request)
    try:
        async for events in stream:
            piece = answer.take(events)
            if piece.finish_reason is not None:
                stream.abort("stop")  # a stop text may have ended it, of which the engine does not know
            yield piece
            if piece.finish_reason is not None:
                return
    finally:
        stream.abort()


async def _serve_several(engine: Submits, answers: Sequence[Answer]) -> AsyncGenerator[Piece, None]:
    arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue(maxsize=len(answers))
    streams: list[AnswerStream] = []
    tasks: list[asyncio.Task[None]] = []

    # Each answer has its place from the beginning, so that a body which was taken is answered.
    num_reserved = len(answers)

    def start(answer: Answer) -> None:
        nonlocal num_reserved
        num_reserved -= 1
        streams.append(engine.submit(answer.request, reserved=True))
        tasks.append(asyncio.create_task(_pump(streams[-1], answer, arrived)))

    engine.reserve(num_reserved)
    try:
        for answer in answers:
            if answer.is_first:
                start(answer)
        num_ended = 0
        while num_ended < len(answers):
            news = await arrived.get()
            if isinstance(news, Exception):
                raise news
            for follower in news.answer.followers:
                start(follower)
            news.answer.followers = ()
            num_ended += news.finish_reason is not None
            yield news
    finally:
        engine.release(num_reserved)
        for stream in streams:
            stream.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gathered(engine: Submits, answers: Sequence[Answer]) -> list[list[Piece]]:
    """All pieces of each answer, once every answer has ended."""
    pieces: list[list[Piece]] = [[] for _ in answers]
    async with aclosing(serve(engine, answers)) as news:
        async for piece in news:
            pieces[piece.answer.index].append(piece)
    return pieces


async def _pump(stream: AnswerStream, answer: Answer, arrived: asyncio.Queue[Piece | Exception]) -> None:
    """Move the pieces of one answer into the queue that all answers of a body share."""
    try:
        async for events in stream:
            piece = answer.take(events)
            if piece.finish_reason is not None:
                stream.abort("stop")  # a stop text may have ended it, of which the engine does not know
            await arrived.put(piece)
            if piece.finish_reason is not None:
                return
    except Exception as error:  # told to whoever reads the queue
        await arrived.put(error)
