"""What every benchmark prints: where it ran, a text table, and one JSON line last."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from eightfold._version import __version__
from eightfold.kernels.hardware import detect


def environment() -> dict[str, str | int]:
    """The machine, the versions and the commit behind a row of numbers."""
    hardware = detect("auto")
    root = Path(__file__).resolve().parents[2]
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "hardware": hardware.name,
        "threads": hardware.num_threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "eightfold": __version__,
        "commit": git.stdout.strip() or "unknown",
    }


def print_report(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], result: Mapping[str, object]) -> None:
    """Print the environment, a table whose first column is text and whose others are numbers, and the JSON line."""
    where = environment()
    print(f"{title}\n{where['hardware']}, {where['threads']} threads, torch {where['torch']}, commit {where['commit']}\n")
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *[cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]]
        print("  ".join(cells).rstrip())
    print(json.dumps({"benchmark": title, **where, **result}))
