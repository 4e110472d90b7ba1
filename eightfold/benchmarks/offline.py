"""What measurements of an engine without a server share: the model in bf16 and in MXFP8, one after the other, and the limit."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch

from eightfold.benchmarks.cpu import copy_bandwidth
from eightfold.benchmarks.profiling import Operator, operator_rows
from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.errors import InputError
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.models.checkpoint import serialized_form
from eightfold.types import Progress, SamplingParams

Weights: TypeAlias = Literal["bf16", "mxfp8"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
_COPIED_BYTES = 1 << 30
_COPIES = 12


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of serving the model.

    Attributes:
        name: "bf16", "mxfp8", or the format of a checkpoint that is quantized already.
        config: asks for it.
    """

    name: str
    config: EngineConfig


def variants(config: EngineConfig, only: str | None = None) -> tuple[Variant, ...]:
    """The ways to measure: unquantized and MXFP8; a checkpoint that is quantized already as it is.

    Args:
        config: the model and everything else; what it says of quantizing is for MXFP8.
        only: one of `WEIGHTS`; None is both.

    Raises:
        InputError: another name, or a model that cannot be found.
    """
    if only is not None and only not in WEIGHTS:
        raise InputError("--only", got=only, expected=" or ".join(WEIGHTS))
    path = resolve_model(config.model, revision=config.revision, needs_weights=config.needs_weights)
    config = replace(config, model=str(path), revision=None)
    form = serialized_form(path)
    if form is not None:
        return (Variant(" and ".join(form.algorithms), config),)
    plain = replace(
        config,
        quantization=None,
        quantization_ignored_layers=(),
        quantize_lm_head=False,
        requantize=False,
        scale_rule="ceil",
        fp8_gemm_backend="auto",
        moe_runner_backend="auto",
    )
    found = (Variant("bf16", plain), Variant("mxfp8", replace(config, quantization="mxfp8")))
    return tuple(item for item in found if only in (None, item.name))


def engines(found: tuple[Variant, ...], report: Progress | None) -> Iterator[tuple[str, Engine]]:
    """Each variant's engine, loaded and seen to answer; let go of it before the next one is asked for.

    Raises:
        InputError: as `Engine.load`.
        RuntimeError: it answers NaN, so that its speed means nothing.
    """
    for variant in found:
        engine = Engine.load(variant.config, report=report)
        _check(engine)
        yield variant.name, engine
        device = engine.loaded.kernels.hardware.device
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def bandwidth_of(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    if device.type == "cpu":
        return copy_bandwidth(rounds=4) * 1e9
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_COPIES):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    nbytes = source.nbytes
    del source, target
    torch.cuda.empty_cache()  # the model is to have all of the memory
    return 2 * nbytes / statistics.median(seconds)


def device_of(config: EngineConfig) -> torch.device:
    """Where a configuration runs."""
    return detect(config.device).device


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_prompts(count: int, length: int, vocab_size: int, random: np.random.Generator) -> list[list[int]]:
    """Token ids of prompts of one length."""
    return [random.integers(vocab_size, size=length).tolist() for _ in range(count)]


def check_profile(file: Path | None) -> None:
    """Refuse a file for traces that cannot be written, before anything is measured.

    Raises:
        InputError: its folder is missing.
    """
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InputError("--profile", got=str(file), expected="a file in a folder that is there")


def trace_file(file: Path, parts: tuple[str, ...], *, is_only: bool) -> Path:
    """Where one of several traces goes: the file that was asked for, with the parts before its suffix where it is not alone."""
    return file if is_only else file.with_name("-".join((file.stem, *parts)) + file.suffix)


def print_operators(title: str, operators: list[Operator]) -> None:
    """Print what took most time."""
    print(f"\n{title}: the {len(operators)} operators that take most")
    for line in operator_rows(operators):
        print(line)


def _check(engine: Engine) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=0, ignore_eos=True)
    engine.add(engine.make_request("check", [1, 2, 3], params))
    while engine.has_work:
        for event in engine.step():
            if event.logprobs is None or not math.isfinite(event.logprobs.logprob):
                raise RuntimeError(f"this engine answers {event}, so that its speed means nothing")
