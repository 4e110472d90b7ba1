"""The one place that decides configuration. Nothing else reads the environment, and nothing writes to a configuration.

`EngineConfig` is what a user says; None means "decide for me". `resolve()` turns it into a `ResolvedConfig` with no None among
the values that the engine runs on, and with the origin of each: the user, the default, the model or the hardware, and why.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from eightfold.errors import InputError
from eightfold.types import Quantization

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
LoadFormat: TypeAlias = Literal["auto", "safetensors", "dummy"]
StateDtype: TypeAlias = Literal["auto", "float32", "bfloat16"]
ScaleRuleName: TypeAlias = Literal["ceil", "floor"]
SamplingDefaults: TypeAlias = Literal["model", "openai"]
OriginKind: TypeAlias = Literal["user", "default", "model", "hardware"]

DEFAULT_CHUNKED_PREFILL_SIZE = {"cpu": 512, "cuda": 2048}
DEFAULT_MAX_RUNNING_REQUESTS = 256
DEFAULT_MEM_FRACTION = {"cpu": 0.6, "cuda": 0.88}
DEFAULT_PAGE_SIZE = 16
DEFAULT_STATE_RATIO = 0.9
DEFAULT_TRACK_INTERVAL = 256


def option(default: Any = MISSING, *, help: str, choices: object = None, aliases: Sequence[str] = ()) -> Any:  # noqa: A002
    """A field of a configuration, with what the command line says about it.

    Args:
        default: the field's value where the user gives none.
        help: one sentence for `--help`.
        choices: a Literal type whose words are the accepted ones.
        aliases: further spellings of the flag, such as SGLang's.
    """
    words = get_args(choices) if choices is not None else ()
    return field(default=default, metadata={"help": help, "choices": words, "aliases": tuple(aliases)})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a user asks of an engine. Each field is a flag of the command line under the same name, with dashes."""

    model: str = option(help="A folder, a hub id, or an alias such as smollm2.", aliases=("--model-path",))
    revision: str | None = option(None, help="Branch, tag or commit of a hub id.")
    quantization: Quantization | None = option(
        None, choices=Quantization, help="Quantize the weights while they load; the default serves the checkpoint as it is."
    )
    quantization_ignored_layers: tuple[str, ...] = option(
        (), help="Layers to leave unquantized: dotted names or parts of them, matched at the dots."
    )
    quantize_lm_head: bool = option(False, help="Quantize the output head too, which costs some quality.")
    requantize: bool = option(
        False, help="With --quantization mxfp8, make MXFP8 of a checkpoint in another FP8, which rounds its weights twice."
    )
    scale_rule: ScaleRuleName = option("ceil", choices=ScaleRuleName, help="How a block's largest value becomes its scale.")
    dtype: Dtype = option("auto", choices=Dtype, help="Data type of the activations and of the KV cache.")
    device: Device = option("auto", choices=Device, help="Where to run.")
    load_format: LoadFormat = option(
        "auto", choices=LoadFormat, help="Format of the weight files; dummy makes random weights of a configuration alone."
    )
    fp8_gemm_backend: str = option("auto", help="Backend of the quantized dense products.")
    moe_runner_backend: str = option("auto", help="Backend of quantized mixtures of experts.")
    attention_backend: str = option("auto", help="Backend of paged attention.")
    context_length: int | None = option(None, help="Longest sequence, prompt and answer together.")
    max_running_requests: int | None = option(None, help="Most requests that run at once.")
    max_total_tokens: int | None = option(None, help="Tokens that the KV cache holds.")
    mem_fraction_static: float | None = option(None, help="Share of the device's memory for weights and the KV cache.")
    chunked_prefill_size: int | None = option(None, help="Most tokens that one step computes.")
    page_size: int | None = option(None, help="Tokens in a block of the KV cache.")
    mamba_ssm_dtype: StateDtype = option(
        "auto", choices=StateDtype, help="Data type of the states of recurrent layers; auto is what the checkpoint says."
    )
    max_mamba_cache_size: int | None = option(
        None, help="Recurrent states in memory, one for each running request and the rest for prefixes that come again."
    )
    mamba_full_memory_ratio: float | None = option(
        None, help="Memory of recurrent states as a multiple of that of the KV cache."
    )
    mamba_track_interval: int | None = option(
        None, help="Tokens between the recurrent states that are kept while an answer grows; a multiple of the page size."
    )
    disable_prefix_cache: bool = option(
        False, help="Compute every prompt from its first token.", aliases=("--disable-radix-cache",)
    )
    sampling_defaults: SamplingDefaults = option(
        "model", choices=SamplingDefaults, help="Sampling values that a request leaves out: the checkpoint's, or OpenAI's."
    )
    seed: int | None = option(None, help="Seed of requests that bring none, and of dummy weights.", aliases=("--random-seed",))

    def __post_init__(self) -> None:
        layers: object = self.quantization_ignored_layers
        if isinstance(layers, str) or not isinstance(layers, Iterable) or not all(isinstance(name, str) for name in layers):
            raise InputError("quantization_ignored_layers", got=repr(layers), expected="a list of names")
        object.__setattr__(self, "quantization_ignored_layers", tuple(layers))
        for item in fields(self):
            if "choices" in item.metadata:
                _check_choice(item, getattr(self, item.name))
        for name in ("model", "fp8_gemm_backend", "moe_runner_backend", "attention_backend", "revision"):
            _check_text(name, getattr(self, name), optional=name == "revision")
        for name in ("quantize_lm_head", "requantize", "disable_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(name, got=repr(getattr(self, name)), expected="true or false")
        for name in ("context_length", "max_running_requests", "max_total_tokens", "chunked_prefill_size", "page_size"):
            _check_positive(name, getattr(self, name))
        _check_positive("mamba_track_interval", self.mamba_track_interval)
        _check_positive("max_mamba_cache_size", self.max_mamba_cache_size, least=0)
        fraction = self.mem_fraction_static
        if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
            raise InputError("mem_fraction_static", got=repr(fraction), expected="a number above 0 and at most 1")
        ratio = self.mamba_full_memory_ratio
        if ratio is not None and not (_is_number(ratio) and 0 < ratio < math.inf):
            raise InputError("mamba_full_memory_ratio", got=repr(ratio), expected="a number above 0")
        if self.seed is not None and not (_is_number(self.seed) and isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise InputError("seed", got=repr(self.seed), expected="a whole number from 0 to 2^64 - 1")
        for name in ("quantize_lm_head", "requantize"):
            if getattr(self, name) and self.quantization is None:
                raise InputError(name, got=True, expected="it to go with quantization='mxfp8'")

    @property
    def needs_weights(self) -> bool:
        """Whether the model must have weight files."""
        return self.load_format != "dummy"

    @classmethod
    def from_kwargs(cls, model: str, **kwargs: Any) -> EngineConfig:
        """Build from keywords, refusing an unknown one with the nearest known name."""
        refuse_unknown("LLM argument", kwargs, [item.name for item in fields(cls)])
        return cls(model=model, **kwargs)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a resolved value came from, and why it is what it is."""

    name: str
    value: object
    kind: OriginKind
    why: str


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig in which everything is decided. Without recurrent layers `max_mamba_cache_size` is 0."""

    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    context_length: int
    max_running_requests: int
    max_total_tokens: int
    mem_fraction_static: float
    chunked_prefill_size: int
    page_size: int
    mamba_ssm_dtype: Literal["float32", "bfloat16"]
    max_mamba_cache_size: int
    mamba_full_memory_ratio: float
    mamba_track_interval: int
    seed: int
    origins: tuple[Origin, ...]

    def table(self) -> str:
        """One line a value, with its origin: what is printed at start."""
        rows = [(item.name, str(item.value), f"{item.kind}: {item.why}" if item.why else item.kind) for item in self.origins]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What resolving needs to know of a checkpoint.

    Attributes:
        context_length: the longest sequence that the model was made for.
        weight_bytes: bytes of the weights as they will lie in memory.
        kv_bytes_per_token: dtype of the activations to bytes of keys and values that one token occupies, over all layers.
        state_bytes: dtypes of the activations and of the states to bytes of the recurrent states of one sequence, over all
            layers; empty, or 0, where none recurs.
        state_dtype: dtype that the checkpoint wants for the states; None where it does not say.
        stored_as: formats in which the checkpoint holds its weights, such as "mxfp8 by config.json"; empty where they are
            not quantized.
    """

    context_length: int
    weight_bytes: int
    kv_bytes_per_token: Mapping[str, int]
    state_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    state_dtype: str | None = None
    stored_as: str = ""


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """What resolving needs to know of the machine."""

    device: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int


def resolve(config: EngineConfig, model: ModelFacts, hardware: HardwareFacts) -> ResolvedConfig:
    """Decide everything that `config` leaves open.

    Raises:
        InputError: a value that the model or the machine cannot meet, with what would fit.
    """
    values: dict[str, Any] = {}
    origins: list[Origin] = []

    def settle(name: str, otherwise: object, kind: OriginKind, why: str) -> Any:
        given = getattr(config, name)
        by_user = given is not None and given != "auto"
        values[name] = given if by_user else otherwise
        origins.append(Origin(name, values[name], "user" if by_user else kind, "" if by_user else why))
        return values[name]

    if model.stored_as:
        settle("quantization", None, "model", f"its weights are served as they are, in {model.stored_as}")
    settle("device", hardware.device, "hardware", hardware.name)
    dtype = settle("dtype", *default_dtype(hardware.device))
    context = settle("context_length", model.context_length, "model", "the longest sequence it was made for")
    if context > model.context_length:
        raise InputError(
            "context_length", got=context, expected=f"at most {model.context_length}, which the model was made for"
        )
    fraction = settle("mem_fraction_static", DEFAULT_MEM_FRACTION[hardware.device], "default", "")
    page = settle("page_size", DEFAULT_PAGE_SIZE, "default", "")
    chunk = settle("chunked_prefill_size", *default_chunk(hardware.device))
    settle("seed", 0, "default", "")
    state_dtype = settle("mamba_ssm_dtype", *default_state_dtype(model.state_dtype))
    settle("mamba_full_memory_ratio", DEFAULT_STATE_RATIO, "default", "")
    _check_interval(settle("mamba_track_interval", -(-DEFAULT_TRACK_INTERVAL // page) * page, "default", ""), page)

    room = int(hardware.memory_bytes * fraction) - model.weight_bytes
    kv_bytes, state_bytes = model.kv_bytes_per_token[dtype], model.state_bytes.get((dtype, state_dtype), 0)
    if state_bytes:
        limits = _state_limits(config, room, kv_bytes, state_bytes, page=page, chunks=-(-context // chunk))
        running = settle("max_running_requests", *limits.running)
        room -= settle("max_mamba_cache_size", *limits.slots) * state_bytes
    else:
        _refuse_state_options(config)
        running = settle("max_running_requests", DEFAULT_MAX_RUNNING_REQUESTS, "default", "")
        settle("max_mamba_cache_size", 0, "model", "no layer has a recurrent state")
    beside = "the weights and the recurrent states" if state_bytes else "the weights"
    fits = max(room, 0) // kv_bytes if kv_bytes else sys.maxsize
    wanted = min(fits, running * context)
    why = f"what fits into {fraction:.0%} of memory" if wanted == fits else "every running request at full length"
    total = settle("max_total_tokens", wanted // page * page, "hardware", why)
    if total > fits:
        raise InputError("max_total_tokens", got=total, expected=f"at most {fits}, which fit beside {beside}")
    if total < page:
        needed = (model.weight_bytes + page * kv_bytes) / hardware.memory_bytes
        raise InputError(
            "max_total_tokens",
            got=total,
            expected=f"at least one page of {page} tokens",
            remedy=f"mem_fraction_static of {needed:.2f} would hold the weights and one page" if fits < page else "",
        )
    for item in fields(EngineConfig):
        if item.name not in values:
            values[item.name] = getattr(config, item.name)
            kind: OriginKind = "default" if values[item.name] == item.default else "user"
            origins.append(Origin(item.name, values[item.name], kind, ""))
    order = [item.name for item in fields(EngineConfig)]
    origins.sort(key=lambda origin: order.index(origin.name))
    return ResolvedConfig(**values, origins=tuple(origins))


@dataclass(frozen=True, slots=True)
class _StateLimits:
    """Requests that may run and slots for states, each as value, kind and why of its origin."""

    running: tuple[int, OriginKind, str]
    slots: tuple[int, OriginKind, str]


def _state_limits(config: EngineConfig, room: int, kv_bytes: int, state_bytes: int, *, page: int, chunks: int) -> _StateLimits:
    """Divide the memory beside the weights between keys and values and states, and the states between requests and prefixes.

    Args:
        config: what the user said.
        room: bytes beside the weights.
        kv_bytes: of one token; 0 where no layer attends.
        state_bytes: of one sequence.
        page: tokens in a block.
        chunks: steps that the longest prompt takes.
    """
    size, requests, tokens, ratio = (
        config.max_mamba_cache_size,
        config.max_running_requests,
        config.max_total_tokens,
        config.mamba_full_memory_ratio,
    )
    if size is not None and ratio is not None:
        raise InputError(
            "mamba_full_memory_ratio", got=ratio, expected="none beside max_mamba_cache_size, which decides already"
        )
    if kv_bytes == 0 and ratio is not None:
        raise InputError(
            "mamba_full_memory_ratio", got=ratio, expected="no value, since no layer of this model has keys and values"
        )
    kept = page if tokens is None else tokens
    most = (room - kept * kv_bytes) // state_bytes
    if most < 1:
        raise InputError(
            "mem_fraction_static",
            got=f"{max(room, 0)} bytes beside the weights",
            expected=f"at least {kept * kv_bytes + state_bytes}, for {kept} tokens and the recurrent states of one request",
            remedy="A larger fraction would hold them." if tokens is None else "So would fewer max_total_tokens.",
        )
    share = DEFAULT_STATE_RATIO if ratio is None else ratio
    if kv_bytes == 0 or (tokens is not None and ratio is None):
        budget = room
    elif tokens is not None:
        budget = int(share * tokens * kv_bytes)
    else:
        budget = int(room * share / (1 + share))
    slots = max(1, min(most, budget // state_bytes))
    if size is not None:
        slots = size
        if not 1 <= size <= most:
            raise InputError(
                "max_mamba_cache_size",
                got=size,
                expected=f"at least 1 and at most {most}, which fit beside the weights and {kept} tokens",
            )
    elif requests is not None and ratio is None:
        slots = max(slots, min(requests, most))
    if requests is not None and requests > slots:
        raise InputError(
            "max_running_requests",
            got=requests,
            expected=f"at most {slots}, each with a recurrent state",
            remedy=f"max_mamba_cache_size of up to {most} would fit." if most > slots else "",
        )
    keeps_prefixes = not config.disable_prefix_cache
    fit = max(1, slots * 2 // 3) if keeps_prefixes else slots
    running = min(DEFAULT_MAX_RUNNING_REQUESTS, fit) if requests is None else requests
    # Beside its own state a request can make use of one for each chunk of its prompt and one for its answer.
    useful = running * (2 + chunks) if keeps_prefixes else running
    is_lowered = running < DEFAULT_MAX_RUNNING_REQUESTS
    running_why = "two thirds of the recurrent states that fit" if keeps_prefixes else "the recurrent states that fit"
    slots_why = "all that running requests can use" if slots >= useful else f"{state_bytes} bytes each"
    return _StateLimits(
        (running, *(("hardware", running_why) if is_lowered else ("default", ""))),
        (min(slots, useful), "hardware", slots_why),
    )


def _check_interval(interval: int, page: int) -> None:
    if interval % page:
        raise InputError(
            "mamba_track_interval",
            got=interval,
            expected=f"a multiple of the page size {page}",
            remedy=f"{-(-interval // page) * page} is one.",
        )


def _refuse_state_options(config: EngineConfig) -> None:
    """Refuse what says something about recurrent states of a model that has none."""
    defaults = {item.name: item.default for item in fields(EngineConfig)}
    for name in ("mamba_ssm_dtype", "max_mamba_cache_size", "mamba_full_memory_ratio", "mamba_track_interval"):
        if (given := getattr(config, name)) != defaults[name]:
            raise InputError(name, got=given, expected="no value, since no layer of this model has a recurrent state")


def default_chunk(device: str) -> tuple[int, OriginKind, str]:
    """Most tokens of a step, and why: a step is to last seconds at most, however slow the device, for all wait for its end."""
    size = DEFAULT_CHUNKED_PREFILL_SIZE[device]
    return size, "hardware", "so that a step of a large model takes seconds" if device == "cpu" else "what fills the device"


def refuse_unknown(kind: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise InputError for the first name that is not known, with the nearest one that is."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            remedy = f"Did you mean {near[0]}?" if near else ""
            raise InputError(f"{kind} {name}", got="an unknown name", expected=f"one of: {', '.join(known)}", remedy=remedy)


def cache_dir() -> Path:
    """The folder for converted models: EIGHTFOLD_CACHE, else `eightfold` below XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("EIGHTFOLD_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eightfold"


def default_dtype(device: str) -> tuple[Literal["float32", "bfloat16"], OriginKind, str]:
    """The dtype of activations where the user names none, and why."""
    if device == "cpu":
        return "float32", "hardware", "a CPU multiplies fp32 fastest; weights keep their own type"
    return "bfloat16", "hardware", "the type that the tensor cores take"


def default_state_dtype(said: str | None) -> tuple[str, OriginKind, str]:
    """The dtype of recurrent states where the user names none, by what the checkpoint says, and why."""
    return ("float32", "default", "") if said is None else (said, "model", "its mamba_ssm_cache_dtype")


def _check_choice(item: Field[Any], value: object) -> None:
    words = item.metadata["choices"]
    if words and value not in words and not (value is None and item.default is None):
        raise InputError(item.name, got=repr(value), expected=f"one of: {', '.join(words)}")


def _check_positive(name: str, value: object, *, least: int = 1) -> None:
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value >= least):
        raise InputError(name, got=repr(value), expected=f"a whole number, at least {least}")


def _check_text(name: str, value: object, *, optional: bool) -> None:
    if not (isinstance(value, str) and value) and not (optional and value is None):
        raise InputError(name, got=repr(value), expected="a text that is not empty")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
