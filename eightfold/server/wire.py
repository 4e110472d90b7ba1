"""What the two processes tell each other: plain data, as msgpack.

The HTTP process sends commands, the engine's process sends news. A message is one frame, and holds one of the types below with
its tag. Requests and token events travel as the dataclasses that they are, so that a field that is added to one of them needs
nothing here; what was encoded from a checked value is checked again where it arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from eightfold.errors import InputError
from eightfold.types import Request, TokenEvent


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """A decided value: its name, the value as a text, who decided it (user, default, model, hardware), and why."""

    name: str
    value: str
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """What became of one tensor: the type that it has now, whether and why it was quantized or not, and its bytes."""

    name: str
    decision: str
    quantized: bool
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A backend in use, how many layers use it, and the better ones with the reason of each to decline."""

    operation: str
    backend: str
    count: int
    declined: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the HTTP side knows of the model, once it is loaded.

    Attributes:
        model_path: the checkpoint's folder, which also has the tokenizer.
        context_length: most tokens of prompt and answer that can be held: within the context and the cache.
        vocab_size: token ids lie below it.
        eos_token_ids: tokens that end an answer.
        sampling_defaults: values for what a request leaves open, by the names of `SamplingParams`.
        max_running_requests: most requests that run at once.
        num_blocks: blocks of the KV cache.
        block_size: tokens in a block.
        load_seconds: time to read, quantize and bind the weights.
        config: every decided value.
        quantization: every tensor, in the order of the files.
        backends: what computes.
        notes: what is worth a line of the log: tensors that were passed over or cut.
    """

    model_path: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, Any]
    max_running_requests: int
    num_blocks: int
    block_size: int
    load_seconds: float = 0.0
    config: tuple[ConfigRow, ...] = ()
    quantization: tuple[TensorRow, ...] = ()
    backends: tuple[BackendRow, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRow:
    """Sums over the steps of one kind.

    Attributes:
        steps: how many ended.
        tokens: that they computed.
        seconds: that their runs took.
        gap_seconds: that the device waited before them for the host.
    """

    steps: int
    tokens: int
    seconds: float
    gap_seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The scheduler's plain numbers at one moment; the counters count since the start.

    Attributes:
        running: sequences that hold blocks.
        waiting: sequences in the queue.
        num_blocks: blocks of the KV cache.
        free_blocks: blocks that no sequence holds.
        prompt_tokens: of all requests.
        generated_tokens: of all answers.
        prefix_queries: tokens of admitted sequences.
        prefix_hits: those of them that were in the cache.
        prefix_lost: those of them whose keys and values were in the cache, and no recurrent state with them.
        preemptions: how often a sequence gave its blocks back.
        num_steps: steps that ended.
        steps: sums over steps by kind: "prefill", "decode" or "mixed".
        is_paused: whether steps wait for `continue`.
    """

    running: int = 0
    waiting: int = 0
    num_blocks: int = 0
    free_blocks: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_lost: int = 0
    preemptions: int = 0
    num_steps: int = 0
    steps: dict[str, StepRow] = field(default_factory=dict)
    is_paused: bool = False


# From the HTTP process to the engine's.


class Load(msgspec.Struct, tag="load", array_like=True):
    """The first message: what to load, as keywords of `EngineConfig`, and how to behave.

    Attributes:
        options: of the configuration.
        null_step_seconds: a step of the null engine takes this long.
        watchdog_seconds: a turn of the loop that takes longer ends the process.
    """

    options: dict[str, Any]
    null_step_seconds: float
    watchdog_seconds: float


class Submit(msgspec.Struct, tag="submit", array_like=True):
    """Requests to queue."""

    requests: list[Request]


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Requests to end, where they still go on."""

    request_ids: list[str]


class Control(msgspec.Struct, tag="control", array_like=True):
    """Something to do between two steps. Its `Reply` has the same number."""

    number: int
    command: str
    arguments: dict[str, Any]


class Close(msgspec.Struct, tag="close", array_like=True):
    """Leave, whatever is under way."""


Command: TypeAlias = Load | Submit | Abort | Control | Close


# From the engine's process to the HTTP process.


class Progress(msgspec.Struct, tag="progress", array_like=True):
    """How far loading is."""

    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine is loaded."""

    model: ServedModel


class Refusal(msgspec.Struct, tag="refusal", array_like=True):
    """What was asked cannot be done: the parts of an `InputError`, and the request, where it is about one."""

    request_id: str
    what: str
    got: str
    expected: str
    remedy: str

    @classmethod
    def of(cls, error: InputError, request_id: str = "") -> Refusal:
        """An error as it travels."""
        return cls(request_id, error.what, str(error.got), error.expected, error.remedy)

    def error(self) -> InputError:
        """The error again."""
        return InputError(self.what, got=self.got, expected=self.expected, remedy=self.remedy)


class Failure(msgspec.Struct, tag="failure", array_like=True):
    """The engine could not be loaded, or broke: the process ends after this.

    Attributes:
        message: one sentence.
        refusal: the input that is to blame, where one is.
    """

    message: str
    refusal: Refusal | None = None


class News(msgspec.Struct, tag="news", array_like=True):
    """What one turn of the loop brought, for all requests. A turn that brought nothing is a sign of life.

    Attributes:
        events: of the step, and of requests that were aborted.
        started: requests whose first tokens were computed in the step.
        step_began: when the step began, by the clock of `time.monotonic`.
        snapshot: the numbers, where some time has gone by since the last ones.
    """

    events: list[TokenEvent]
    started: list[str]
    step_began: float
    snapshot: Snapshot | None


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """The end of a `Control`: a result, or why there is none."""

    number: int
    result: dict[str, Any]
    refusal: Refusal | None


FromEngine: TypeAlias = Progress | Failure | Ready | Refusal | News | Reply


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes messages, and decodes those of each direction."""

    encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    commands: msgspec.msgpack.Decoder[Command] = field(default_factory=lambda: msgspec.msgpack.Decoder(Command))
    news: msgspec.msgpack.Decoder[FromEngine] = field(default_factory=lambda: msgspec.msgpack.Decoder(FromEngine))

    def encode(self, message: Command | FromEngine) -> bytes:
        """A message as one frame."""
        return self.encoder.encode(message)


def model_from(fields: Mapping[str, Any]) -> ServedModel:
    """A model out of the result of a `Control`."""
    return msgspec.convert(fields, ServedModel)
