"""`eightfold quantize`: a checkpoint in MXFP8, written for this engine and for others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eightfold.cli.output import complain, megabytes, progress_bars, table, write
from eightfold.errors import InputError
from eightfold.hub.names import identify

_RULES = ("ceil", "floor")
# Windows of text and their tokens, by which quality is measured.
_WINDOWS, _LENGTH = 8, 512


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
    measure: Annotated[
        bool, typer.Option(help="Score text with both, and add perplexity and KL to the model card. Both are loaded.")
    ] = False,
) -> None:
    """Write a checkpoint in MXFP8: whole, or not at all. One that is in MXFP8 already changes its dialect."""
    identify(model)  # a wrong name is refused before anything heavy is imported
    if rule not in _RULES:
        raise InputError("--rule", got=rule, expected=f"one of: {', '.join(_RULES)}")
    from eightfold.quant.mxfp8 import ScaleRule
    from eightfold.quantize import add_quality, parse_bytes, quantize_checkpoint

    windows = _windows(model) if measure else []
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
    if windows:
        measured = _quality(model, out, windows)
        add_quality(out, measured)
        rows += measured
    write(table(rows))
    if done.unaligned:
        count = len(done.unaligned)
        complain(
            f"{count} {'tensor has' if count == 1 else 'tensors have'} a K that is no multiple of 32, as {done.unaligned[0]}: "
            "Eightfold reads them, transformers and compressed-tensors do not. --ignore keeps such layers as they are."
        )


def _windows(model: str) -> list[list[int]]:
    """Tokens of the text to measure on, before anything is written.

    Raises:
        InputError: the checkpoint is quantized already, or has no tokenizer.
    """
    from eightfold.benchmarks.perplexity import windows_of
    from eightfold.benchmarks.text import state_of_the_union
    from eightfold.hub.resolve import resolve_model
    from eightfold.models.checkpoint import serialized_form
    from eightfold.models.loader import read_model
    from eightfold.text import Tokenizer

    path = resolve_model(model)
    if serialized_form(path) is not None:
        raise InputError("--measure", got=f"{model}, which is quantized", expected="the checkpoint that it was made from")
    length = min(_LENGTH, read_model(path).arch.context_length)
    return windows_of(state_of_the_union(), Tokenizer.load(path), num_windows=_WINDOWS, length=length)


def _quality(model: str, out: Path, windows: list[list[int]]) -> list[tuple[str, str]]:
    """Perplexity of both checkpoints, and what lies between them."""
    from eightfold.config import EngineConfig
    from eightfold.evaluate import evaluate
    from eightfold.quality import Pair

    pair = Pair(EngineConfig(model=str(out)), model)
    reference = pair.reference_logits()
    before, after = evaluate(reference, reference, windows), evaluate(pair.model_logits(), reference, windows)
    return [
        ("measured on", f"{after.num_tokens:,} tokens of State of the Union"),
        ("perplexity", f"{after.perplexity:.3f}, where the source has {before.perplexity:.3f}"),
        ("KL divergence", f"{after.kl:.5f} nats"),
        ("same likeliest token", f"{after.same_top1:.2%}"),
    ]
