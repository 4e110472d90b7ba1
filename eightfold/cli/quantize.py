"""`eightfold quantize`: a checkpoint in MXFP8, written for this engine and for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eightfold.cli.output import megabytes, progress_bars, table, write
from eightfold.errors import InputError
from eightfold.hub.names import identify

_RULES = ("ceil", "floor")


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or an alias such as smollm2.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    dialect: Annotated[
        str,
        typer.Option("--format", metavar="native|modelopt|compressed-tensors", help="Whose configuration and names."),
    ] = "native",
    rule: Annotated[str, typer.Option(metavar="ceil|floor", help="How a block's largest value becomes its scale.")] = "ceil",
    ignore: Annotated[
        list[str] | None, typer.Option(help="Layers to leave unquantized: dotted names or parts of them, matched at the dots.")
    ] = None,
    requantize: Annotated[bool, typer.Option(help="Take a checkpoint in another FP8, rounding its weights twice.")] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Most bytes in a file, which memory must hold.")] = "5GB",
) -> None:
    """Write a checkpoint in MXFP8: whole, or not at all. One that is in MXFP8 already changes its dialect."""
    identify(model)  # a wrong name is refused before anything heavy is imported
    if rule not in _RULES:
        raise InputError("--rule", got=rule, expected=f"one of: {', '.join(_RULES)}")
    from eightfold.quant.mxfp8 import ScaleRule
    from eightfold.quantize import parse_bytes, quantize_checkpoint

    names = tuple(name for text in ignore or () for name in text.split(",") if name)
    with progress_bars() as report:
        done = quantize_checkpoint(
            model,
            out,
            dialect=dialect,  # type: ignore[arg-type]
            rule=ScaleRule(rule),
            ignore=names,
            requantize=requantize,
            max_shard_bytes=parse_bytes(max_shard_size),
            report=report,
        )
    rows = [
        ("written", f"{done.path}, {done.shards} {'file' if done.shards == 1 else 'files'} of weights"),
        ("tensors", f"{len(done.quantized)} in MXFP8, {len(done.kept)} kept"),
        ("bytes", f"{megabytes(done.bytes_before)} became {megabytes(done.bytes_after)}"),
    ]
    if done.sqnr_db:
        worst = min(done.sqnr_db, key=lambda name: done.sqnr_db[name])
        rows.append(("worst signal to noise", f"{done.sqnr_db[worst]:.2f} dB, {worst}"))
    write(table(rows))
