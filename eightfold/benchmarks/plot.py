"""The picture of a load test: latencies as cumulative shares, and tokens and requests over time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from eightfold.benchmarks.measures import Answer
from eightfold.errors import InputError

INSTALL = 'pip install "eightfold[bench]"'
_COLOR = "#2563eb"


def require_matplotlib() -> tuple[Any, Any]:
    """The modules that draw, without a display.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        return import_module("matplotlib.figure"), import_module("matplotlib.backends.backend_agg")
    except ModuleNotFoundError:
        raise InputError("--plot", got="no matplotlib", expected="it to be installed", remedy=f"Run {INSTALL}.") from None


def plot(file: Path, title: str, answers: Sequence[Answer], *, start: float, duration: float) -> None:
    """Draw a run as a PNG.

    Args:
        file: where to.
        title: above the picture.
        answers: of the run; those that failed count as requests and have no latencies.
        start, duration: of the run, seconds on the answers' clock.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    figures, canvases = require_matplotlib()
    figure = figures.Figure(figsize=(11, 7), layout="constrained")
    canvases.FigureCanvasAgg(figure)
    figure.suptitle(title)
    (first, gaps), (tokens, requests) = figure.subplots(2, 2)
    done = [answer for answer in answers if not answer.error]
    _cumulative(first, "time to first token, ms", [answer.ttft * 1e3 for answer in done])
    _cumulative(gaps, "inter-token latency, ms", [gap * 1e3 for answer in done for gap in answer.gaps])

    step = max(duration / 100, 1e-3)
    edges = np.arange(0.0, duration + step, step)
    times = [time - start for answer in done for time in answer.frame_times]
    weights = [answer.completion_tokens / len(answer.frame_times) for answer in done for _ in answer.frame_times]
    counts, _ = np.histogram(times, edges, weights=weights)
    tokens.plot(edges[:-1] + step / 2, counts / step, color=_COLOR)
    tokens.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))

    changes = sorted([(answer.sent - start, 1) for answer in answers] + [(answer.ended - start, -1) for answer in answers])
    under_way = np.cumsum([change for _, change in changes])
    requests.step([time for time, _ in changes], under_way, where="post", color=_COLOR)
    requests.set(xlabel="seconds", ylabel="requests under way", ylim=(0, None))
    for axes in (first, gaps, tokens, requests):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise InputError("--plot", got=str(error), expected="a file that can be written") from error


def _cumulative(axes: Any, label: str, values: Sequence[float]) -> None:
    """The share of values up to each, with the median and the 99th percentile marked."""
    if values:
        ordered = np.sort(values)
        axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered), color=_COLOR)
        for percentile, style in ((50, "--"), (99, ":")):
            value = float(np.percentile(ordered, percentile))
            axes.axvline(value, color="black", linewidth=0.8, linestyle=style, label=f"p{percentile} {value:,.1f} ms")
        axes.legend(frameon=False, loc="lower right")
    axes.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
