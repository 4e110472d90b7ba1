"""The picture of quality is drawn: of few kinds and many, with a budget and without, and with nothing to show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eightfold.benchmarks.quality_plot import plot_quality
from eightfold.budget import KeptLayers, Point, Unit
from eightfold.errors import InputError
from eightfold.quality import tensor_noise
from eightfold.quant.evidence import Evidence

KINDS = [f"kind_{letter}" for letter in "abcdefghijklmnop"]
TENSORS = [
    tensor_noise(f"m.layers.{index}.experts.{expert}.{kind}.weight", 31.0 - expert, Evidence({-expert: 3, -9: 1}))
    for index in range(4)
    for expert in range(2)
    for kind in KINDS
]
UNITS = tuple(Unit((f"m.layers.{index}",), 200, 100) for index in range(3))
KEPT = KeptLayers(
    0.02, UNITS, (0.03, 0.02, 0.01), 1, (Point(0, 300, 0.06), Point(1, 400, 0.02), Point(3, 600, 0.0)), ("m.layers.0",), 100
)


def size(file: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_it_is_drawn_and_a_budget_takes_a_second_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, tensors, kept in (
        ("one", TENSORS, None),
        ("two", TENSORS, KEPT),
        ("head", [tensor_noise("lm_head.weight", 30.0, Evidence({1: 2}))], KEPT),
        ("nothing", [], None),
    ):
        plot_quality(tmp_path / f"{name}.png", "a model", tensors, kept)
    assert size(tmp_path / "two.png")[1] == 2 * size(tmp_path / "one.png")[1] == size(tmp_path / "head.png")[1]
    assert (tmp_path / "nothing.png").stat().st_size < (tmp_path / "one.png").stat().st_size


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match=r"--plot: got .*No such file"):
        plot_quality(tmp_path / "gone/a.png", "a model", TENSORS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"--plot: got no matplotlib; .*Run pip install \"eightfold\[bench\]\""):
        plot_quality(tmp_path / "a.png", "a model", TENSORS)
