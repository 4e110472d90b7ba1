"""`eightfold eval`: how far quantizing moves a model, on real text and tensor by tensor, and what a budget of it costs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eightfold.cli.flags import Given, takes_flags
from eightfold.cli.loading import config_to_measure
from eightfold.cli.output import megabytes, progress_bars, table, write
from eightfold.errors import InputError
from eightfold.hub.names import identify

if TYPE_CHECKING:
    from eightfold.budget import KeptLayers
    from eightfold.evaluate import Quality
    from eightfold.quality import Pair, TensorNoise

_FLAGS = (
    "revision",
    "quantization",
    "quantization_ignored_layers",
    "quantize_lm_head",
    "requantize",
    "scale_rule",
    "dtype",
    "device",
    "fp8_gemm_backend",
    "moe_runner_backend",
    "attention_backend",
)
# Lines of the lists of what is worst.
_WORST = 10


@takes_flags(engine=_FLAGS, sampling=False, defaults={"quantization": "mxfp8"})
def evaluate(
    given: Given,
    text: Annotated[Path | None, typer.Option(help="A text file to measure on. [default: State of the Union]")] = None,
    against: Annotated[
        str, typer.Option(metavar="bf16|CHECKPOINT", help="The weights before they were quantized: bf16 is MODEL's own files.")
    ] = "bf16",
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to score.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    budget: Annotated[
        str | None,
        typer.Option(
            "--quantization-budget",
            metavar="KL=NATS",
            help="Find the fewest layers to keep for this KL divergence.",
            show_default=False,
        ),
    ] = None,
    calibration_windows: Annotated[
        int, typer.Option(min=1, help="Windows, after those to score, that the budget holds on.")
    ] = 2,
    save_ignored: Annotated[
        Path | None, typer.Option(help="Write the layers to keep here, as --quantization-ignored-layers takes them.")
    ] = None,
    save_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything measured here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw noise, exponents and budget into this file.")
    ] = None,
) -> None:
    """Measure what quantizing does: perplexity, KL divergence and the same likeliest token on text, and noise by layer.

    Both models run with the same activations, so that what shows is the weights. A model that is quantized in its files needs
    --against with the one that it was made from.
    """
    limit = None if budget is None else parse_budget(budget)
    if save_ignored is not None and limit is None:
        raise InputError("--save-ignored", got="it without --quantization-budget", expected="both, or neither")
    for name in (given.config.model, *([] if against == "bf16" else [against])):
        identify(name, given.config.revision if name == given.config.model else None)
    from eightfold.benchmarks import quality_plot
    from eightfold.benchmarks.perplexity import windows_of
    from eightfold.benchmarks.plot import require_matplotlib
    from eightfold.budget import choose
    from eightfold.hub.resolve import resolve_model
    from eightfold.quality import Pair
    from eightfold.text import Tokenizer

    if plot is not None:
        require_matplotlib()
    with progress_bars() as report:
        path = resolve_model(given.config.model, revision=given.config.revision, report=report)
        pair = Pair(config_to_measure(given, path), against, report=report)
        if length > pair.context_length:
            raise InputError("--length", got=length, expected=f"at most {pair.context_length}, the context of the model")
        count = windows + (calibration_windows if limit is not None else 0)
        token_ids = windows_of(_text(text), Tokenizer.load(pair.path), num_windows=count, length=length)
        kept = None if limit is None else choose(pair, token_ids[windows:], limit, report=report)
    rows = dict(_measured(pair, token_ids[:windows], kept))
    noise = list(pair.noise())
    _print(given.config.model, against, pair, text, rows, noise)
    if kept is not None:
        _print_budget(kept)
    if save_ignored is not None and kept is not None:
        _save("--save-ignored", save_ignored, ",".join(kept.ignored_layers) + "\n")
    if save_json is not None:
        _save("--json", save_json, json.dumps(_record(given, against, text, pair, rows, noise, kept), indent=1) + "\n")
    if plot is not None:
        quality_plot.plot_quality(plot, f"{given.config.model} against {against}", noise, kept)


def parse_budget(text: str) -> float:
    """The number of "KL=0.01".

    Raises:
        InputError: it is no such thing.
    """
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name.strip().lower() != "kl" or not 0 <= number < math.inf:
        raise InputError("--quantization-budget", got=text, expected="KL= and a number of nats, such as KL=0.01")
    return number


def _measured(pair: Pair, windows: Sequence[Sequence[int]], kept: KeptLayers | None) -> Iterator[tuple[str, Quality]]:
    """The rows of the table: the reference, the model, and the model with layers kept."""
    from dataclasses import replace

    from eightfold.evaluate import checkpoint_logits, evaluate

    reference = pair.reference_logits()
    yield "reference", evaluate(reference, reference, windows)
    yield "model", evaluate(pair.model_logits(), reference, windows)
    if kept is not None:
        policy = replace(pair.policy, ignored_layers=kept.ignored_layers)
        spared = checkpoint_logits(pair.path, pair.kernels, policy=policy, rule=pair.rule)
        yield "with layers kept", evaluate(spared, reference, windows)


def _print(
    model: str, against: str, pair: Pair, text: Path | None, rows: dict[str, Quality], noise: Sequence[TensorNoise]
) -> None:
    from eightfold.quality import by_layer

    source = "State of the Union" if text is None else text.name
    activations = str(pair.kernels.activation_dtype).removeprefix("torch.")
    write(f"{model} against {against}: {rows['model'].num_tokens:,} tokens of {source}, activations in {activations}\n")
    lines = [(name, f"{row.perplexity:.3f}", f"{row.kl:.5f}", f"{row.same_top1:.4f}") for name, row in rows.items()]
    write(table([("weights", "perplexity", "KL", "same top-1"), *lines], right=(1, 2, 3)))
    layers = by_layer(noise)[:_WORST]
    if not layers:
        write("\nnothing is quantized")
        return
    finite = [item.sqnr_db for item in noise if math.isfinite(item.sqnr_db)]
    mean = f"{sum(finite) / len(finite):.2f} dB" if finite else "exact"
    write(f"\n{len(noise)} tensors quantized, signal to noise {mean} on average; the {len(layers)} worst layers:")
    shown = [
        (item.layer, _decibels(item.sqnr_db_min), _decibels(item.sqnr_db_mean), item.worst.removeprefix(f"{item.layer}."))
        for item in layers
    ]
    write(table([("layer", "least dB", "mean dB", "worst tensor"), *shown], right=(1, 2)))


def _print_budget(kept: KeptLayers) -> None:
    write(f"\nbudget of KL {kept.budget:g} on {kept.num_tokens:,} further tokens: {kept.kept} of {len(kept.units)} layers kept")
    rows = [
        (str(point.kept), megabytes(point.nbytes), f"{point.kl:.5f}", "chosen" if point.kept == kept.kept else "")
        for point in kept.curve
    ]
    write(table([("kept", "weights", "KL", ""), *rows], right=(0, 1, 2)))
    if kept.ignored_layers:
        write(f"\n--quantization-ignored-layers {','.join(kept.ignored_layers)}")


def _decibels(value: float) -> str:
    return "exact" if math.isinf(value) else f"{value:.2f}"


def _text(file: Path | None) -> str:
    if file is None:
        from eightfold.benchmarks.text import state_of_the_union

        return state_of_the_union()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("--text", got=str(error), expected="a text file in UTF-8") from error


def _save(flag: str, file: Path, content: str) -> None:
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(flag, got=str(error), expected="a file that can be written") from error


def _record(
    given: Given,
    against: str,
    text: Path | None,
    pair: Pair,
    rows: dict[str, Quality],
    noise: Sequence[TensorNoise],
    kept: KeptLayers | None,
) -> dict[str, Any]:
    from eightfold.benchmarks.report import environment
    from eightfold.quality import by_layer

    return {
        "model": given.config.model,
        "against": against,
        "text": "State of the Union" if text is None else str(text),
        "scale_rule": pair.rule.value,
        "ignored_layers": pair.policy.ignored_layers,
        "environment": environment(),
        "rows": {name: asdict(row) for name, row in rows.items()},
        "layers": [
            asdict(layer) | {"sqnr_db_min": _finite(layer.sqnr_db_min), "sqnr_db_mean": _finite(layer.sqnr_db_mean)}
            for layer in by_layer(noise)
        ],
        "tensors": [
            {
                "name": item.name,
                "kind": item.kind,
                "sqnr_db": _finite(item.sqnr_db),
                "exponents": None if item.evidence is None else item.evidence.exponents,
            }
            for item in noise
        ],
        "budget": None if kept is None else asdict(kept),
    }


def _finite(value: float) -> float | None:
    """JSON has no word for infinity, which here means that nothing was lost."""
    return value if math.isfinite(value) else None
