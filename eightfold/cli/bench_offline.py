"""`eightfold bench latency` and `eightfold bench throughput`: measurements of an engine without a server."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from eightfold.cli.flags import Given, takes_flags
from eightfold.cli.output import progress_bars
from eightfold.config import EngineConfig
from eightfold.errors import InputError
from eightfold.hub.names import identify

# Both kinds of weights are measured, and random prompts have no prefix that comes again.
_FLAGS = tuple(item.name for item in fields(EngineConfig) if item.name not in ("model", "disable_prefix_cache"))
_Only = Annotated[
    str | None, typer.Option(metavar="bf16|mxfp8", help="Measure these weights alone. [default: both]", show_default=False)
]
_Profile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace, one a case, and print what takes most time.")
]


@takes_flags(engine=_FLAGS, sampling=False, defaults={"quantization": "mxfp8"})
def latency(
    given: Given,
    batch_size: Annotated[
        list[str] | None, typer.Option(metavar="N,N...", help="Sequences that decode together. [default: 1,16,64]")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Steps of decoding that are timed.")] = 32,
    prefill_batch_size: Annotated[
        list[str] | None,
        typer.Option(metavar="N,N...", help="Prompts that are computed together. [default: as --batch-size]"),
    ] = None,
    prefill_input_len: Annotated[
        int | None, typer.Option(help="Tokens of each of them. [default: as --input-len]", show_default=False)
    ] = None,
    num_iters: Annotated[int, typer.Option(help="Repetitions, of which the fastest counts.")] = 3,
    num_iters_warmup: Annotated[int, typer.Option(help="Repetitions before, which are not timed.")] = 1,
    only: _Only = None,
    profile: _Profile = None,
) -> None:
    """Measure prefill and decode by batch size, in bf16 and in MXFP8, beside the bandwidth of a copy. The last line is JSON."""
    identify(given.config.model, given.config.revision, needs_weights=given.config.needs_weights)
    from eightfold.benchmarks.latency import Settings, run

    settings = Settings(
        batch_sizes=_numbers("--batch-size", batch_size) or Settings().batch_sizes,
        input_len=input_len,
        output_len=output_len,
        prefill_batch_sizes=_numbers("--prefill-batch-size", prefill_batch_size),
        prefill_input_len=prefill_input_len,
        num_iters=num_iters,
        num_iters_warmup=num_iters_warmup,
        seed=given.config.seed or 0,
        profile=profile,
    )
    with progress_bars() as report:
        run(given.config, settings, only=only, report=report)


@takes_flags(engine=_FLAGS, sampling=False, defaults={"quantization": "mxfp8"})
def throughput(
    given: Given,
    num_prompts: Annotated[int, typer.Option(help="Requests that are measured.")] = 200,
    request_rate: Annotated[float, typer.Option(help="Requests a second, as a Poisson process.")] = math.inf,
    input_len: Annotated[
        int | None, typer.Option(help="Tokens of every prompt. [default: as in conversations]", show_default=False)
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="Tokens of every answer. [default: as in conversations]", show_default=False)
    ] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before, which are not measured.")] = 1,
    only: _Only = None,
    profile: _Profile = None,
) -> None:
    """Put many requests through an engine, in bf16 and in MXFP8: tokens a second and latencies. The last line is JSON."""
    identify(given.config.model, given.config.revision, needs_weights=given.config.needs_weights)
    from eightfold.benchmarks.serve import lengths
    from eightfold.benchmarks.throughput import Settings, run

    settings = Settings(
        num_prompts=num_prompts,
        request_rate=request_rate,
        mix=lengths(input_len, output_len),
        num_warmups=num_warmups,
        seed=given.config.seed or 0,
        profile=profile,
    )
    with progress_bars() as report:
        run(given.config, settings, only=only, report=report)


def _numbers(flag: str, words: list[str] | None) -> tuple[int, ...]:
    """Whole numbers from words such as 1,16,64."""
    parts = [part.strip() for word in words or () for part in word.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(flag, got=",".join(parts), expected="whole numbers of at least 1 with commas, such as 1,16,64")
    return tuple(map(int, parts))
