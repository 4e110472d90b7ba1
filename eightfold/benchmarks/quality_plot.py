"""The picture of `eightfold eval`: noise by layer and kind, block exponents of the worst layer, and what a budget buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from eightfold.benchmarks.plot import require_matplotlib
from eightfold.budget import KeptLayers
from eightfold.errors import InputError
from eightfold.quality import TensorNoise, by_kind, by_layer, exponents_of

# Okabe and Ito's colours, and some more; marks differ too. 12 and 7 have no common factor, so 84 kinds look different.
_COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
    *("#8c564b", "#7f7f7f", "#9467bd", "#b5a642", "#7a1f3d"),
)
_MARKS = ("o", "s", "^", "D", "v", "P", "X")
# Less than this between the top and the bottom, in dB, would make chance look like structure.
_LEAST_SPAN = 1.0


def plot_quality(file: Path, title: str, tensors: Sequence[TensorNoise], kept: KeptLayers | None = None) -> None:
    """Draw a PNG.

    Args:
        file: where to.
        title: above the picture.
        tensors: of the model that are quantized.
        kept: what a budget bought, which takes a second row.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    figures, canvases = require_matplotlib()
    rows = 1 if kept is None else 2
    figure = figures.Figure(figsize=(14, 5.2 * rows), layout="constrained")
    canvases.FigureCanvasAgg(figure)
    figure.suptitle(title)
    axes = figure.subplots(rows, 2, squeeze=False, width_ratios=(3, 2))
    noise = by_kind(tensors)
    styles = dict(zip(noise, zip(cycle(_COLORS), cycle(_MARKS), strict=False), strict=False))
    _noise(axes[0][0], noise, styles)
    if layers := by_layer(tensors):
        _exponents(axes[0][1], layers[0].layer, exponents_of(tensors, layers[0].layer), styles)
    if kept is not None:
        _effects(axes[1][0], kept)
        _curve(axes[1][1], kept)
    for panel in axes.flat:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise InputError("--plot", got=str(error), expected="a file that can be written") from error


def _noise(axes: Any, noise: Mapping[str, Mapping[int, tuple[float, float]]], styles: Mapping[str, tuple[str, str]]) -> None:
    """Mean SQNR of each kind in each layer, and a line down to the worst of its tensors where there are several."""
    for kind, layers in noise.items():
        color, mark = styles[kind]
        means = [mean for _, mean in layers.values()]
        axes.plot(list(layers), means, color=color, marker=mark, markersize=4, linewidth=0.8, label=kind)
        spread = {index: pair for index, pair in layers.items() if pair[0] < pair[1]}
        if spread:
            axes.vlines(list(spread), *zip(*spread.values(), strict=True), color=color, linewidth=0.8, alpha=0.5)
    axes.set(xlabel="layer", ylabel="signal to noise, dB (more is better)", title="noise by layer and kind")
    if noise:
        low, high = axes.get_ylim()
        room = max(0.0, _LEAST_SPAN - (high - low)) / 2
        axes.set_ylim(low - room, high + room)
        axes.legend(frameon=False, fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _exponents(axes: Any, layer: str, shares: Mapping[str, Mapping[int, float]], styles: Mapping[str, tuple[str, str]]) -> None:
    """The share of blocks at each scale exponent, one bar for each kind."""
    width = 0.8 / max(1, len(shares))
    for number, (kind, found) in enumerate(shares.items()):
        places = [exponent + (number - (len(shares) - 1) / 2) * width for exponent in found]
        axes.bar(places, list(found.values()), width, color=styles.get(kind, (_COLORS[0], ""))[0], label=kind)
    axes.set(
        xlabel="exponent of a block's scale",
        ylabel="share of blocks, logarithmic",
        title=f"block exponents of the worst layer, {layer}",
    )
    if shares:
        axes.set_yscale("log")
        exponents = [exponent for found in shares.values() for exponent in found]
        axes.set_xticks(range(min(exponents), max(exponents) + 1, 1 + (max(exponents) - min(exponents)) // 16))
        axes.legend(frameon=False, fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _effects(axes: Any, kept: KeptLayers) -> None:
    """What each unit causes alone, the largest first, and which of them are kept."""
    numbers = range(1, len(kept.effects) + 1)
    for part, label, color in (
        (slice(0, kept.kept), "kept", _COLORS[1]),
        (slice(kept.kept, None), "quantized", _COLORS[0]),
    ):
        axes.bar(numbers[part], kept.effects[part], 0.8, color=color, label=label)
    axes.set(xlabel="layers, by their effect", ylabel="KL with that layer alone quantized, nats", title="effect of each layer")
    axes.legend(frameon=False)


def _curve(axes: Any, kept: KeptLayers) -> None:
    """Bytes against KL, with the budget and what was chosen."""
    megabytes = [point.nbytes / 1e6 for point in kept.curve]
    axes.plot(megabytes, [point.kl for point in kept.curve], color=_COLORS[0], marker="o", markersize=4, linewidth=1)
    axes.axhline(kept.budget, color="black", linewidth=0.8, linestyle="--", label=f"budget {kept.budget:g}")
    chosen = kept.chosen
    label = f"{kept.kept} of {len(kept.units)} layers kept, {chosen.nbytes / 1e6:,.1f} MB"
    axes.plot([chosen.nbytes / 1e6], [chosen.kl], color=_COLORS[1], marker="o", markersize=9, linestyle="", label=label)
    axes.set(xlabel="weights in memory, MB", ylabel="KL on the calibration text, nats", title="what bytes buy", ylim=(0, None))
    axes.legend(frameon=False)
