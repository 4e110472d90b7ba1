"""`LLM`: a model in this process. Prompts in, texts out, whole or as a stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from eightfold.config import EngineConfig, ResolvedConfig
from eightfold.detokenizer import Detokenizer, TextEvent
from eightfold.engine.engine import Engine
from eightfold.errors import InputError
from eightfold.grammar.compiler import GrammarCompiler
from eightfold.hub.resolve import resolve_model
from eightfold.requests import params_of_answers
from eightfold.text import Tokenizer
from eightfold.types import FinishReason, Progress, Quantization, Request, SamplingParams, TokenEvent, TokenLogprobs

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[int] | Messages
"""A text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Attributes:
        index: which of the prompt's `n` answers.
        text: the text.
        token_ids: the tokens, the one that ended the answer included.
        finish_reason: "stop" by an end token or a stop text, "length" by `max_tokens` or the context, "abort".
        stop_reason: the stop text, or the id of the token, that ended it; None where neither did.
        logprobs: one for each token, where asked for.
        failure: why it ended with "abort" where the grammar could not be kept to the end; else empty.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the answers to one prompt took, in seconds since the prompt was queued.

    Attributes:
        time_to_first_token: until the first token of the first answer.
        total: until the last token of the last answer.
        tokens_per_second: pace of the first answer after its first token; None where it has one token.
    """

    time_to_first_token: float
    total: float
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt. `text`, `token_ids`, `finish_reason` and `logprobs` are those of the first answer.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        completions: its `n` answers.
        num_cached_tokens: prompt tokens that the prefix cache supplied to the first answer.
        prompt_logprobs: one for each prompt token but the first, where asked for.
        timing: how long it took.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] | None
    timing: Timing

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first answer."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log probabilities of the first answer's tokens, where asked for."""
        return self.completions[0].logprobs


class LLM:
    """A model, ready to answer. Meant for one thread; several streams of it may be open at once and take turns.

    Args:
        model: a folder, an alias such as "smollm2", or `owner/name` on the Hugging Face hub.
        quantization: "mxfp8" quantizes the weights while they load; None serves the checkpoint as it is.
        report: told about slow work: a phase, units done, units in all.
        options: further fields of `EngineConfig`, by name.

    Attributes:
        engine: the engine below.
        tokenizer: the checkpoint's tokenizer; with dummy weights a folder may have none, and then prompts are token ids.

    Raises:
        InputError: an unknown option, a value or a checkpoint that cannot be used, a backend that cannot run.
    """

    def __init__(
        self,
        model: str | Path,
        quantization: Quantization | None = None,
        *,
        report: Progress | None = None,
        **options: Any,
    ) -> None:
        name = str(model) if isinstance(model, Path) else model
        config = EngineConfig.from_kwargs(name, quantization=quantization, **options)
        path = resolve_model(config.model, revision=config.revision, report=report, needs_weights=config.needs_weights)
        Engine.check(path)  # transformers reads the configuration for the tokenizer, and would take its faults for that one's
        # The tokenizer comes before the weights: where it is missing, nobody waits for the weights to learn it.
        tokenizer = Tokenizer.load(path, required=config.needs_weights)
        self._adopt(Engine.load(replace(config, model=str(path), revision=None), report=report), tokenizer)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer) -> LLM:
        """An LLM over an engine that is loaded already."""
        llm = cls.__new__(cls)
        llm._adopt(engine, tokenizer)
        return llm

    def _adopt(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._live: dict[str, _Answer] = {}
        self._num_prompts = 0
        self._provide_grammars()

    def _provide_grammars(self) -> None:
        engine = self.engine
        engine.grammar_compiler = GrammarCompiler(self.tokenizer, engine.vocab_size, engine.eos_token_ids)

    @property
    def config(self) -> ResolvedConfig:
        """Everything that was decided."""
        return self.engine.config

    def update_weights(self, model: str | Path, *, revision: str | None = None, report: Progress | None = None) -> None:
        """Put the weights of another checkpoint of the same shapes in the place of these; see `Engine.update_weights`.

        Args:
            model: a folder, an alias or a hub id.
            revision: branch, tag or commit of a hub id.
            report: told about downloads and loading.

        Raises:
            InputError: streams are open, or a checkpoint cannot be used or has other shapes; everything goes on as before.
        """
        self.engine.update_weights(str(model), revision=revision, report=report)
        self._provide_grammars()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts, all in one batch.

        Args:
            prompts: one prompt or a list of them. A prompt is a text, a list of token ids, or a list of chat messages.
            params: for all prompts, or one for each.

        Returns:
            One output for each prompt, in their order.

        Raises:
            InputError: a prompt or a parameter that cannot be used; then nothing was queued.
        """
        groups = self._prepare(_prompt_list(prompts), params)
        answers = [answer for group in groups for answer in group]
        events: dict[str, list[TextEvent]] = {answer.request.request_id: [] for answer in answers}
        with closing(self._serve(answers)) as stream:
            for event in stream:
                events[event.request_id].append(event)
        return [_output(group, events) for group in groups]

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> RequestOutput:
        """Answer one conversation: messages with "role" and "content", through the model's chat template.

        Raises:
            InputError: as `generate`; also where the tokenizer has no chat template.
        """
        return self.generate([messages], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[TextEvent, None, None]:
        """Answer one prompt, token by token. Work starts with the first `next()`; closing the iterator ends it early.

        Raises:
            InputError: as `generate`, at the call.
        """
        (answers,) = self._prepare([prompt], params)
        return self._serve(answers)

    def _prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[list[_Answer]]:
        """The answers to ask the engine for, by prompt. Nothing is queued here, and everything is checked."""
        return [self._answers(prompt, each) for prompt, each in zip(prompts, _params_list(params, len(prompts)), strict=True)]

    def _answers(self, prompt: Prompt, params: SamplingParams) -> list[_Answer]:
        token_ids = self._token_ids(prompt)
        self._num_prompts += 1
        answers: list[_Answer] = []
        for index, own in enumerate(params_of_answers(params)):
            request = self.engine.make_request(f"{self._num_prompts}-{index}", token_ids, own)
            answers.append(_Answer(request, Detokenizer(self.tokenizer, request, index)))
        if not self.config.disable_prefix_cache:
            # The other answers wait for the first one's prompt, and find it in the cache.
            answers[0].followers = answers[1:]
        return answers

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("prompt", got="an empty text", expected="at least one character")
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat([_message(item) for item in prompt])
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return [_token_id(item) for item in prompt]
        raise InputError("prompt", got=repr(prompt), expected="a text, a list of token ids, or a list of chat messages")

    def _serve(self, answers: Sequence[_Answer]) -> Generator[TextEvent, None, None]:
        """Queue answers and yield their events; whatever ends this early aborts them."""
        arrived: deque[TextEvent] = deque()
        waiting = {follower for answer in answers for follower in answer.followers}
        try:
            for answer in answers:
                answer.arrived = arrived
                if answer not in waiting:
                    self._start(answer)
            num_left = len(answers)
            while num_left:
                while not arrived:
                    self._step()
                event = arrived.popleft()
                num_left -= event.finish_reason is not None
                yield event
        finally:
            for answer in answers:
                self._live.pop(answer.request.request_id, None)
                self.engine.abort(answer.request.request_id)

    def _start(self, answer: _Answer) -> None:
        self.engine.add(answer.request)
        self._live[answer.request.request_id] = answer
        answer.queued_at = time.perf_counter()

    def _step(self) -> None:
        """One step of the engine, whose events go to all streams that are open."""
        if not self.engine.has_work:
            raise RuntimeError("answers are awaited, and the engine has no work")
        for token_event in self.engine.step():
            answer = self._live.get(token_event.request_id)
            if answer is None:
                continue  # a request that somebody gave to the engine directly
            event = answer.take(token_event)
            followers, answer.followers = answer.followers, ()
            for follower in followers:
                self._start(follower)
            if event.finish_reason is not None:
                del self._live[token_event.request_id]
                if token_event.finish_reason is None:
                    self.engine.abort(token_event.request_id)


class _Answer:
    """An answer on its way."""

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.followers: Sequence[_Answer] = ()
        self.arrived: deque[TextEvent] = deque()
        self.queued_at = 0.0
        self.first_token_at: float | None = None
        self.ended_at = 0.0

    def take(self, token_event: TokenEvent) -> TextEvent:
        """Decode an event, and put it where the stream that it belongs to finds it."""
        self.ended_at = time.perf_counter()
        self.first_token_at = self.first_token_at or self.ended_at
        event = self.detokenizer.take(token_event)
        self.arrived.append(event)
        return event


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt as a list of one. A list of numbers or of messages is one prompt."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    if not prompts:
        raise InputError("prompts", got="an empty list", expected="at least one prompt")
    if isinstance(prompts[0], int | Mapping):
        return [prompts]  # type: ignore[list-item]  # the elements say so, which the type of the list cannot
    return prompts  # type: ignore[return-value]


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise InputError("params", got=repr(params), expected="SamplingParams, or a list of them")
    if len(params) != count:
        raise InputError("params", got=f"{len(params)} of them for {count} prompts", expected="one, or one for each prompt")
    return params


def _message(item: object) -> Mapping[str, Any]:
    if not isinstance(item, Mapping):
        raise InputError("prompt", got=f"{item!r} among chat messages", expected='a mapping with "role" and "content"')
    return item


def _token_id(item: object) -> int:
    if not isinstance(item, int) or isinstance(item, bool):
        raise InputError("prompt", got=f"{item!r} among token ids", expected="whole numbers")
    return item


def _output(answers: Sequence[_Answer], events: Mapping[str, Sequence[TextEvent]]) -> RequestOutput:
    first = answers[0]
    history = events[first.request.request_id]
    started = first.first_token_at or first.ended_at
    num_tokens = sum(len(event.token_ids) for event in history)
    asked = first.request.params.prompt_logprobs is not None
    return RequestOutput(
        prompt_token_ids=first.request.prompt_token_ids,
        completions=tuple(_completion(answer, events[answer.request.request_id]) for answer in answers),
        num_cached_tokens=history[-1].num_cached_tokens,
        prompt_logprobs=history[0].prompt_logprobs if asked else None,
        timing=Timing(
            time_to_first_token=started - first.queued_at,
            total=max(answer.ended_at for answer in answers) - first.queued_at,
            tokens_per_second=(num_tokens - 1) / (first.ended_at - started) if num_tokens > 1 else None,
        ),
    )


def _completion(answer: _Answer, events: Sequence[TextEvent]) -> Completion:
    last = events[-1]
    return Completion(
        index=last.index,
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        finish_reason=last.finish_reason or "abort",
        stop_reason=last.stop_reason,
        logprobs=tuple(item for event in events for item in event.logprobs)
        if answer.request.params.logprobs is not None
        else None,
        failure=last.failure,
    )
