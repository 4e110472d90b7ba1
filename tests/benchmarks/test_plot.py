"""A picture is drawn, and what is missing is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eightfold.benchmarks.measures import Answer
from eightfold.benchmarks.plot import plot
from eightfold.errors import InputError

ANSWERS = [
    Answer(0.0, 0.0, 0.3, [0.1, 0.2, 0.3], 5, 0, 3),
    Answer(0.1, 0.1, 0.4, [0.2, 0.4], 5, 0, 2),
    Answer(0.2, 0.2, 0.2, error="timeout"),
]


def test_a_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, answers in (("full", ANSWERS), ("empty", [])):
        file = tmp_path / f"{name}.png"
        plot(file, "a run", answers, start=0.0, duration=0.4)
        assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"--plot: got .*No such file"):
        plot(tmp_path / "gone" / "a.png", "a run", ANSWERS, start=0.0, duration=0.4)


def test_without_matplotlib_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"--plot: got no matplotlib; .*Run pip install \"eightfold\[bench\]\""):
        plot(tmp_path / "a.png", "a run", [], start=0.0, duration=1.0)
