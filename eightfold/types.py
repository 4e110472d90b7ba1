"""Plain data that crosses boundaries: what a user asks, what the engine schedules, what comes back. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias, get_args

from eightfold.errors import InputError

Progress: TypeAlias = Callable[[str, int, int], None]
"""How the core reports slow work: phase, units done, units in all (bytes for downloads and loading). It never draws."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
Quantization: TypeAlias = Literal["mxfp8"]

GrammarKind: TypeAlias = Literal["json_schema", "regex", "lark"]

MOST_INTEGER = 2**31 - 1
"""Largest count of tokens, and largest token id, that a request may name."""

# What a parameter that neither the user nor the checkpoint sets means.
NEUTRAL_SAMPLING: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer has to be.

    Attributes:
        kind: the language of `text`.
        text: a JSON schema as JSON, a regular expression, or a grammar in llguidance's variant of Lark.
        begin_after: text after which the grammar begins, such as "</think>"; empty where it begins at once.
        opened_by: text such as "<think>": an answer that does not begin with it, whitespace aside, waits for no `begin_after`
            and is held to the grammar from its first token. Empty where every answer waits.
        name: what errors call it, such as the field that it came in.
    """

    kind: GrammarKind
    text: str
    begin_after: str = ""
    opened_by: str = ""
    name: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise InputError("grammar.kind", got=repr(self.kind), expected=f"one of {', '.join(kinds)}")
        for name in ("text", "begin_after", "opened_by", "name"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"grammar.{name}", got=repr(getattr(self, name)), expected="a text")
        if self.opened_by and not self.begin_after:
            raise InputError("grammar.opened_by", got=repr(self.opened_by), expected="a begin_after beside it")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, *, begin_after: str = "") -> Grammar:
        """JSON that is valid under a schema; `{}` is any JSON.

        Raises:
            InputError: the schema is no JSON itself.
        """
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError("json_schema", got=str(error), expected="what can be written as JSON") from error
        return cls("json_schema", text, begin_after)

    @classmethod
    def regex(cls, pattern: str, *, begin_after: str = "") -> Grammar:
        """Text that a regular expression matches from end to end."""
        return cls("regex", pattern, begin_after)


class Constraint(Protocol):
    """A grammar at work on one sequence."""

    def mask(self, token_ids: SequenceOf[int]) -> bytes | None:
        """Which tokens may follow.

        Args:
            token_ids: the answer so far. It may be called from any thread, but not from two at once.

        Returns:
            One bit for each token id, the lowest bit of the first byte for id 0; None where every token may follow. Where none
            may, `failure` says why.
        """

    @property
    def failure(self) -> str:
        """Why no token may follow; empty while one may."""


class GrammarCompiler(Protocol):
    """Makes constraints of grammars. It knows the model's tokens, which the engine does not."""

    def compile(self, grammar: Grammar) -> Constraint:
        """A constraint for one sequence.

        Raises:
            InputError: a grammar that cannot be used.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Values are checked on construction.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy. None, here and below, takes the checkpoint's `generation_config.json`, else the neutral value.
        top_p: smallest set of tokens whose probability reaches this share; in (0, 1].
        top_k: this many likeliest tokens; 0 or -1 is all of them.
        min_p: tokens at least this likely relative to the likeliest; in [0, 1].
        repetition_penalty: above 1 makes tokens of the prompt and the output less likely (CTRL, arXiv 1909.05858).
        presence_penalty: subtracted once from the logits of tokens in the output; in [-2, 2].
        frequency_penalty: subtracted for each occurrence in the output; in [-2, 2].
        logit_bias: token id to a value in [-100, 100] that is added to its logit.
        seed: makes a request's samples its own: the same whatever else is in the batch. None draws one from the engine.
        stop: texts that end the answer. They are cut off unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the answer, beside the model's own end tokens.
        min_tokens: no end token and no stop text before this many tokens.
        ignore_eos: go on past the model's own end tokens.
        n: answers for each prompt.
        logprobs: for each generated token its log probability and this many of the likeliest alternatives; None gives none.
        prompt_logprobs: the same for the tokens of the prompt, the first of which has none.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop text that ended the answer.
        grammar: what the answer has to be. An end token comes only where the grammar is done, and before `min_tokens` only
            where it allows nothing else.
    """

    max_tokens: int = 128
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _as_tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        bias_of: object = self.logit_bias
        if not isinstance(bias_of, Mapping):
            raise InputError("logit_bias", got=repr(bias_of), expected="a mapping of token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(bias_of))
        for name, check, expected in _SAMPLING_CHECKS:
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL) and not check(value):
                raise InputError(name, got=repr(value), expected=expected)
        for token, bias in self.logit_bias.items():
            if not (_is_token(token) and _is_number(bias) and -100 <= bias <= 100):
                raise InputError("logit_bias", got=f"{token!r}: {bias!r}", expected="token ids with values in [-100, 100]")
        if self.min_tokens > self.max_tokens:
            raise InputError("min_tokens", got=self.min_tokens, expected=f"at most max_tokens, which is {self.max_tokens}")
        if self.grammar is not None and self.ignore_eos:
            raise InputError("ignore_eos", got=True, expected="false beside a grammar, which says where the answer ends")

    def resolved(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Every None among the sampling values replaced by the checkpoint's default, else by the neutral value."""
        unset = {name for name in NEUTRAL_SAMPLING if getattr(self, name) is None}
        return replace(self, **{name: defaults.get(name, NEUTRAL_SAMPLING[name]) for name in unset})


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(name, got=repr(value), expected="a list")
    return tuple(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_INTEGER


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and (low < value if open_low else low <= value) and value <= high


def _integer(low: int, high: int = MOST_INTEGER) -> Callable[[Any], bool]:
    return lambda value: _is_int(value) and low <= value <= high


_SAMPLING_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens", _integer(1), "a whole number, at least 1 and at most 2^31 - 1"),
    ("temperature", _number(0.0, math.inf), "a finite number, at least 0 (0 is greedy)"),
    ("top_p", _number(0.0, 1.0, open_low=True), "a number above 0 and at most 1"),
    ("top_k", _integer(-1), "a whole number from 1 to 2^31 - 1, or 0 or -1 for all tokens"),
    ("min_p", _number(0.0, 1.0), "a number in [0, 1]"),
    ("repetition_penalty", _number(0.0, math.inf, open_low=True), "a finite number above 0 (1 is none)"),
    ("presence_penalty", _number(-2.0, 2.0), "a number in [-2, 2]"),
    ("frequency_penalty", _number(-2.0, 2.0), "a number in [-2, 2]"),
    ("seed", _integer(0, 2**64 - 1), "a whole number from 0 to 2^64 - 1"),
    ("stop", lambda value: all(isinstance(text, str) and text for text in value), "texts that are not empty"),
    ("stop_token_ids", lambda value: all(map(_is_token, value)), "token ids"),
    ("min_tokens", _integer(0), "a whole number from 0 to 2^31 - 1"),
    ("ignore_eos", lambda value: isinstance(value, bool), "true or false"),
    ("n", _integer(1, 128), "a whole number from 1 to 128"),
    ("logprobs", _integer(0, 20), "a whole number from 0 to 20"),
    ("prompt_logprobs", _integer(0, 20), "a whole number from 0 to 20"),
    ("skip_special_tokens", lambda value: isinstance(value, bool), "true or false"),
    ("include_stop_str_in_output", lambda value: isinstance(value, bool), "true or false"),
    ("grammar", lambda value: isinstance(value, Grammar), "a Grammar"),
)
_OPTIONAL = frozenset(item.name for item in fields(SamplingParams) if item.default is None)
assert {check[0] for check in _SAMPLING_CHECKS} | {"logit_bias"} == {item.name for item in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt for the engine, as token ids, with parameters that hold no None among the sampling values."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int


class SequenceStatus(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while the engine works on it.

    Attributes:
        request: what was asked.
        token_ids: the prompt's tokens, then the generated ones.
        num_computed_tokens: how many of `token_ids` have their keys and values in the cache.
        num_cached_tokens: prompt tokens that were found in the prefix cache when it was first scheduled.
        block_table: the KV blocks that hold it, in order.
        block_keys: prefix keys of its full blocks, as far as they were needed; they depend on its tokens alone.
        num_published_blocks: how many blocks of its table others may find by their keys.
        cache_epoch: flushes of the cache before its first block; a later flush ends its publishing.
        state_slot: where its recurrent states are, while it holds blocks; None for a model without them.
        num_matched_tokens: how many of `token_ids` had their keys and values in the cache when it began; with recurrent states
            it began further down where none was kept there.
        rolling_save: the last state that was kept on the way of its answer.
        prompt_logprobs: of its prompt so far, where asked for.
        num_preemptions: how often its blocks were taken back.
        constraint: its request's grammar at work, where there is one. It goes when the sequence goes.
        status: waiting, running or finished.
    """

    request: Request
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    cache_epoch: int = 0
    state_slot: int | None = None
    num_matched_tokens: int = 0
    rolling_save: StateSave | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_preemptions: int = 0
    constraint: Constraint | None = None
    status: SequenceStatus = SequenceStatus.WAITING

    @classmethod
    def start(cls, request: Request, constraint: Constraint | None = None) -> Sequence:
        """A waiting sequence with nothing computed."""
        return cls(request, list(request.prompt_token_ids), constraint=constraint)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed: 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class StateSave:
    """A copy of a sequence's recurrent states that others may go on from.

    Attributes:
        position: tokens of the sequence that the states have taken in: whole blocks, and within its chunk.
        slot: where the copy goes.
    """

    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one sequence that one step computes: `token_ids[start : start + length]`.

    Attributes:
        sequence: whose tokens they are.
        start: tokens that are in the cache already.
        length: tokens to compute, at least 1.
        samples: the chunk reaches the sequence's end, so that its last logits choose the next token.
        restore_from: the state slot that is copied into the sequence's own before the chunk is computed, and before anything
            is saved; None where the sequence has its states, or starts from zeros.
        saves: copies of its states on the way, by position.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    restore_from: int | None = None
    saves: tuple[StateSave, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes: the decodes first, then prefill chunks."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, under the model's own distribution (before temperature and penalties).

    Attributes:
        token_id: the token that stands there.
        logprob: its natural log probability.
        rank: 1 for the likeliest token.
        top: the likeliest tokens with their log probabilities, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner gives back for a batch. Both tuples have an entry for each chunk.

    Attributes:
        token_ids: the token chosen, or None for a chunk that does not sample.
        logprobs: of the chosen token, where asked for.
        prompt_logprobs: of the prompt tokens that follow each position of the chunk, where asked for; else empty.
    """

    token_ids: tuple[int | None, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News about one request. The last one of a request has a `finish_reason`; every request gets such a one.

    Attributes:
        request_id: whose it is.
        token_id: the new token; None where the event brings none (an abort).
        logprobs: of the new token, where asked for.
        prompt_logprobs: with the first token, where asked for: one for each prompt token but the first.
        num_cached_tokens: prompt tokens that the prefix cache supplied.
        finish_reason: why the request ended; None while it goes on.
        stop_token_id: the token that ended it, where one did.
        failure: why it ended with "abort" though nobody asked for that: its grammar came to where no token leads on.
    """

    request_id: str
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    failure: str = ""
