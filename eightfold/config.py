"""The one place that decides configuration. Nothing else reads the environment, and nothing writes to a configuration.

`EngineConfig` is what a user says; None means "decide for me". `resolve()` turns it into a `ResolvedConfig` with no None among
the values that the engine runs on, and with the origin of each: the user, the default, the model or the hardware, and why.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from eightfold.errors import InputError
from eightfold.types import Quantization

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
LoadFormat: TypeAlias = Literal["auto", "safetensors"]
ScaleRuleName: TypeAlias = Literal["ceil", "floor"]
SamplingDefaults: TypeAlias = Literal["model", "openai"]
OriginKind: TypeAlias = Literal["user", "default", "model", "hardware"]

DEFAULT_CHUNKED_PREFILL_SIZE = 2048
DEFAULT_MAX_RUNNING_REQUESTS = 256
DEFAULT_MEM_FRACTION = {"cpu": 0.6, "cuda": 0.88}
DEFAULT_PAGE_SIZE = 16


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
    scale_rule: ScaleRuleName = option("ceil", choices=ScaleRuleName, help="How a block's largest value becomes its scale.")
    dtype: Dtype = option("auto", choices=Dtype, help="Data type of the activations and of the KV cache.")
    device: Device = option("auto", choices=Device, help="Where to run.")
    load_format: LoadFormat = option("auto", choices=LoadFormat, help="Format of the weight files.")
    fp8_gemm_backend: str = option("auto", help="Backend of the quantized dense products.")
    attention_backend: str = option("auto", help="Backend of paged attention.")
    context_length: int | None = option(None, help="Longest sequence, prompt and answer together.")
    max_running_requests: int | None = option(None, help="Most requests that run at once.")
    max_total_tokens: int | None = option(None, help="Tokens that the KV cache holds.")
    mem_fraction_static: float | None = option(None, help="Share of the device's memory for weights and the KV cache.")
    chunked_prefill_size: int | None = option(None, help="Most tokens that one step computes.")
    page_size: int | None = option(None, help="Tokens in a block of the KV cache.")
    disable_prefix_cache: bool = option(
        False, help="Compute every prompt from its first token.", aliases=("--disable-radix-cache",)
    )
    sampling_defaults: SamplingDefaults = option(
        "model", choices=SamplingDefaults, help="Sampling values that a request leaves out: the checkpoint's, or OpenAI's."
    )
    seed: int | None = option(None, help="Seed of requests that bring none.", aliases=("--random-seed",))

    def __post_init__(self) -> None:
        layers: object = self.quantization_ignored_layers
        if isinstance(layers, str) or not isinstance(layers, Iterable) or not all(isinstance(name, str) for name in layers):
            raise InputError("quantization_ignored_layers", got=repr(layers), expected="a list of names")
        object.__setattr__(self, "quantization_ignored_layers", tuple(layers))
        for item in fields(self):
            if "choices" in item.metadata:
                _check_choice(item, getattr(self, item.name))
        for name in ("model", "fp8_gemm_backend", "attention_backend", "revision"):
            _check_text(name, getattr(self, name), optional=name == "revision")
        for name in ("quantize_lm_head", "disable_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(name, got=repr(getattr(self, name)), expected="true or false")
        for name in ("context_length", "max_running_requests", "max_total_tokens", "chunked_prefill_size", "page_size"):
            _check_positive(name, getattr(self, name))
        fraction = self.mem_fraction_static
        if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
            raise InputError("mem_fraction_static", got=repr(fraction), expected="a number above 0 and at most 1")
        if self.seed is not None and not (_is_number(self.seed) and isinstance(self.seed, int) and 0 <= self.seed < 2**64):
            raise InputError("seed", got=repr(self.seed), expected="a whole number from 0 to 2^64 - 1")
        if self.quantize_lm_head and self.quantization is None:
            raise InputError("quantize_lm_head", got=True, expected="it to go with quantization='mxfp8'")

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
    """An EngineConfig in which everything is decided."""

    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    context_length: int
    max_running_requests: int
    max_total_tokens: int
    mem_fraction_static: float
    chunked_prefill_size: int
    page_size: int
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
    """

    context_length: int
    weight_bytes: int
    kv_bytes_per_token: Mapping[str, int]


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

    settle("device", hardware.device, "hardware", hardware.name)
    dtype = settle("dtype", *default_dtype(hardware.device))
    context = settle("context_length", model.context_length, "model", "the longest sequence it was made for")
    if context > model.context_length:
        raise InputError(
            "context_length", got=context, expected=f"at most {model.context_length}, which the model was made for"
        )
    fraction = settle("mem_fraction_static", DEFAULT_MEM_FRACTION[hardware.device], "default", "")
    page = settle("page_size", DEFAULT_PAGE_SIZE, "default", "")
    running = settle("max_running_requests", DEFAULT_MAX_RUNNING_REQUESTS, "default", "")
    settle("chunked_prefill_size", DEFAULT_CHUNKED_PREFILL_SIZE, "default", "")
    settle("seed", 0, "default", "")

    room = int(hardware.memory_bytes * fraction) - model.weight_bytes
    fits = max(room, 0) // model.kv_bytes_per_token[dtype]
    wanted = min(fits, running * context)
    why = f"what fits into {fraction:.0%} of memory" if wanted == fits else "every running request at full length"
    total = settle("max_total_tokens", wanted // page * page, "hardware", why)
    if total > fits:
        raise InputError("max_total_tokens", got=total, expected=f"at most {fits}, which fit beside the weights")
    if total < page:
        needed = (model.weight_bytes + page * model.kv_bytes_per_token[dtype]) / hardware.memory_bytes
        raise InputError(
            "max_total_tokens",
            got=total,
            expected=f"at least one page of {page} tokens",
            remedy=f"mem_fraction_static of {needed:.2f} would hold the weights and one page",
        )
    for item in fields(EngineConfig):
        if item.name not in values:
            values[item.name] = getattr(config, item.name)
            kind: OriginKind = "default" if values[item.name] == item.default else "user"
            origins.append(Origin(item.name, values[item.name], kind, ""))
    order = [item.name for item in fields(EngineConfig)]
    origins.sort(key=lambda origin: order.index(origin.name))
    return ResolvedConfig(**values, origins=tuple(origins))


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


def _check_choice(item: Field[Any], value: object) -> None:
    words = item.metadata["choices"]
    if words and value not in words and not (value is None and item.default is None):
        raise InputError(item.name, got=repr(value), expected=f"one of: {', '.join(words)}")


def _check_positive(name: str, value: object) -> None:
    if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise InputError(name, got=repr(value), expected="a whole number, at least 1")


def _check_text(name: str, value: object, *, optional: bool) -> None:
    if not (isinstance(value, str) and value) and not (optional and value is None):
        raise InputError(name, got=repr(value), expected="a text that is not empty")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
