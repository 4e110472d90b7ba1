"""What clients may send: the bodies of the generation endpoints, and how a body is refused.

A field is taken and acted on, or it is refused with its name. Two lists hold the exceptions: what cannot change an answer is
tolerated, and a field that is not supported passes while it has the value that means "without it".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eightfold.errors import InputError
from eightfold.server.fields import TOLERATED, check_tolerated, same, shown, unknown
from eightfold.types import MOST_INTEGER, Grammar, SamplingParams

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "audio_data": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "image_data": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "lora_path": (),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([],),
    "stream_reasoning": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "token_ids_logprob": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "video_data": ([],),
    "web_search_options": (),
}
"""Fields that other servers have and this one does not, each with the values, beside null, that change nothing."""

MAX_STOPS = 16
DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI gives a completion that does not say how long it may be. A chat goes on to the end of the context."""

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
# JSON may spell halves of surrogate pairs, which are no characters.
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


class UnknownModelError(InputError):
    """The model that a request names is not the one that is served."""


class Body(BaseModel):
    """A JSON object whose fields are all known. A field's description is what an error says was expected of it."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class ControlBody(Body):
    """What steers the server. Nothing beside its own fields is tolerated."""


class StreamOptions(Body):
    """What a stream tells beside the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """The fields that both generation endpoints have."""

    model: str | None = Field(None, description="the name of the model that is served, or nothing")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions | None = Field(
        None, description="an object with include_usage and continuous_usage_stats, each true or false"
    )
    max_tokens: int | None = Field(None, description="a whole number, at least 1 and at most 2^31 - 1")
    temperature: float | None = Field(None, description="a finite number, at least 0 (0 is greedy)")
    top_p: float | None = Field(None, description="a number above 0 and at most 1")
    top_k: int | None = Field(None, description="a whole number from 1 to 2^31 - 1, or 0 or -1 for all tokens")
    min_p: float | None = Field(None, description="a number in [0, 1]")
    repetition_penalty: float | None = Field(None, description="a finite number above 0 (1 is none)")
    presence_penalty: float = Field(0.0, description="a number in [-2, 2]")
    frequency_penalty: float = Field(0.0, description="a number in [-2, 2]")
    logit_bias: dict[str, float] = Field({}, description="an object of token ids, as texts, with numbers in [-100, 100]")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="a whole number from -2^63 to 2^64 - 1")
    stop: str | list[str] = Field([], description=f"a text, or a list of at most {MAX_STOPS} texts, none of them empty")
    stop_token_ids: list[int] = Field([], description="a list of token ids")
    min_tokens: int = Field(0, ge=0, le=MOST_INTEGER, description="a whole number from 0 to 2^31 - 1")
    ignore_eos: bool = Field(False, description="true or false")
    n: int = Field(1, description="a whole number from 1 to 128")
    skip_special_tokens: bool = Field(True, description="true or false")
    include_stop_str_in_output: bool = Field(False, description="true or false")
    response_format: dict[str, Any] | None = Field(
        None, description='an object whose "type" is "text", "json_object" or "json_schema"'
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema")
    guided_regex: str | None = Field(None, description="a regular expression")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every piece of a stream tells the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, **own: Any) -> SamplingParams:
        """The engine's parameters.

        Args:
            own: those that the endpoints have in different shapes, by name.

        Raises:
            InputError: a value out of range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stop) > MAX_STOPS:
            raise InputError("stop", got=f"{len(stop)} texts", expected=f"at most {MAX_STOPS}")
        values: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING}
        values |= {
            "stop": tuple(stop),
            "logit_bias": _logit_bias(self.logit_bias),
            "seed": None if self.seed is None else self.seed % 2**64,
        }
        return SamplingParams(**(values | own))


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "n",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="a text, a list of texts, a list of token ids, or a list of such lists"
    )
    max_tokens: int = Field(
        DEFAULT_COMPLETION_TOKENS, description="a whole number from 1 to 2^31 - 1; 0 is for echo, which then has no answer"
    )
    best_of: int | None = Field(None, description="the value of n: the best of more answers is not looked for")
    echo: bool = Field(False, description="true or false")
    logprobs: int | None = Field(None, description="a whole number from 0 to 20")

    def params(self, grammar: Grammar | None = None) -> SamplingParams:
        """The engine's parameters. Without an answer, one token is generated and not told.

        Args:
            grammar: what the answer has to be.

        Raises:
            InputError: a value out of range.
        """
        if self.best_of is not None and self.best_of != self.n:
            raise InputError("best_of", got=self.best_of, expected=f"{self.n}, the value of n", remedy="Ask for n answers.")
        if self.max_tokens == 0 and not self.echo:
            raise InputError("max_tokens", got=0, expected="at least 1, or echo, which tells the prompt alone")
        return self.sampling(
            max_tokens=1 if self.max_tokens == 0 else self.max_tokens,
            min_tokens=0 if self.max_tokens == 0 else self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
            grammar=grammar,
        )


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(description='a list of objects, each with a "role" and a "content"')
    max_completion_tokens: int | None = Field(None, description="a whole number, at least 1 and at most 2^31 - 1")
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int | None = Field(None, description="a whole number from 0 to 20")
    tools: list[dict[str, Any]] = Field([], description='a list of objects, each with the "type" "function" and a "function"')
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = Field(
        None, description='"auto", "none", "required", or an object that names a function'
    )
    parallel_tool_calls: bool = Field(True, description="true or false")
    add_generation_prompt: bool = Field(True, description="true or false")
    continue_final_message: bool = Field(False, description="true or false")
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object of names that the chat template reads")
    reasoning_effort: str | None = Field(None, description="a text that the chat template reads")
    echo: Literal[False] = Field(False, description="false: a chat has no text to repeat")

    def params(self, room: int, grammar: Grammar | None = None) -> SamplingParams:
        """The engine's parameters.

        Args:
            room: tokens that the context has left for an answer; what an open `max_tokens` becomes.
            grammar: what the answer has to be.

        Raises:
            InputError: a value out of range.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs", got=self.top_logprobs, expected='"logprobs": true beside it')
        name, limit = "max_tokens", self.max_tokens
        if self.max_completion_tokens is not None:
            if limit is not None and limit != self.max_completion_tokens:
                raise InputError(
                    "max_tokens",
                    got=limit,
                    expected=f"{self.max_completion_tokens}, which is max_completion_tokens, or nothing",
                )
            name, limit = "max_completion_tokens", self.max_completion_tokens
        try:
            return self.sampling(
                max_tokens=max(1, room, self.min_tokens) if limit is None else limit,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                grammar=grammar,
            )
        except InputError as error:
            renamed = {"max_tokens": name}
            if self.top_logprobs is not None:
                renamed["logprobs"] = "top_logprobs"
            if error.what not in renamed:
                raise
            raise InputError(renamed[error.what], got=error.got, expected=error.expected, remedy=error.remedy) from error


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """The body of a request.

    Args:
        raw: the bytes as they came.
        kind: what they have to be.

    Raises:
        InputError: no JSON, no object, a field that is unknown or not supported, a value of the wrong type. `what` is the
            field's path, or "body".
    """
    return check_body(decode_json(raw), kind)


def decode_json(raw: bytes) -> object:
    """JSON as Python's own objects.

    Raises:
        InputError: bytes that are no JSON.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if (half := _HALF_PAIR.search(raw)) is not None:
            got = f"{half[0].decode()}, half of a surrogate pair, at byte {half.start()}"
            raise InputError("body", got=got, expected="texts of whole characters") from error
        raise InputError("body", got=f"broken JSON ({error})", expected="one JSON object") from error


def check_body(value: object, kind: type[AnyBody]) -> AnyBody:
    """As `parse_body`, where the JSON is decoded already."""
    if not isinstance(value, dict):
        raise InputError("body", got=shown(value), expected="a JSON object")
    given: dict[str, Any] = {}
    for name, item in value.items():
        if name in kind.model_fields:
            if item is not None:  # null is a field that is left out, as OpenAI's own clients write it
                given[name] = item
        elif issubclass(kind, ControlBody):
            raise unknown(name, kind.model_fields, "")
        elif name in UNSUPPORTED:
            if item is not None and not any(same(item, harmless) for harmless in UNSUPPORTED[name]):
                raise InputError(
                    name, got=shown(item), expected=_harmless(UNSUPPORTED[name]), remedy="This field is not supported."
                )
        elif name in TOLERATED:
            check_tolerated(name, item)
        else:
            raise unknown(name, (*kind.model_fields, *TOLERATED), "")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, given, kind) from error
    except RecursionError as error:
        raise InputError("body", got="objects within objects beyond any use", expected="fewer levels") from error


def _refusal(error: ValidationError, given: Mapping[str, Any], kind: type[Body]) -> InputError:
    """The first thing that pydantic found, in our words."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return InputError(name, got="nothing", expected=_expected(kind, name))
    path, value = _walk(given, first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown(str(first["loc"][-1]), _nested(kind, name).model_fields, name)
    return InputError(path, got=shown(value), expected=_expected(kind, name))


def _nested(kind: type[Body], name: str) -> type[Body]:
    """What the object in a field has to be."""
    annotation = kind.model_fields[name].annotation
    candidates = [annotation, *get_args(annotation)]
    return next(item for item in candidates if isinstance(item, type) and issubclass(item, Body))


def _walk(given: Mapping[str, Any], location: tuple[int | str, ...]) -> tuple[str, object]:
    """The path of a value in the body, and the value; pydantic's names of a union's branches are left out."""
    path = ""
    value: Any = given
    for step in location:
        if isinstance(value, Mapping) and step in value:
            path, value = f"{path}.{step}" if path else str(step), value[step]
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
    return path, value


def _expected(kind: type[Body], name: str) -> str:
    return kind.model_fields[name].description or "another value"


def _harmless(values: tuple[Any, ...]) -> str:
    return " or ".join(["nothing", *(msgspec.json.encode(value).decode() for value in values)])


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for token in given:
        if not _TOKEN_ID.fullmatch(token):
            raise InputError("logit_bias", got=shown(token), expected="token ids, as texts")
    return {int(token): bias for token, bias in given.items()}
