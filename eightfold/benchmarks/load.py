"""Load time and peak memory of a checkpoint, in bf16 and in MXFP8, each in a process of its own.

The peak is what private memory grew by. The files are mapped, and their pages are not counted: the system takes them back
whenever it needs to. "final" is the weights as they lie in memory in the end.

    python -m eightfold.benchmarks.load
    python -m eightfold.benchmarks.load --config nemotron-3-nano --layers 6
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from eightfold.benchmarks.random_checkpoint import read_config, write_checkpoint
from eightfold.benchmarks.report import print_report
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.memory import PeakMemory
from eightfold.models.loader import load, open_checkpoint, plan, read_model
from eightfold.quant.policy import Policy


def measure(model_name: str, quantization: str | None) -> dict[str, Any]:
    """Load once in this process: bytes of the checkpoint and of the model, peak growth of private memory, seconds."""
    path = resolve_model(model_name)
    kernels = Kernels(detect("cpu"), torch.float32)
    with PeakMemory() as peak:
        start = time.perf_counter()
        model, checkpoint = read_model(path), open_checkpoint(path)
        report = load(model, checkpoint, plan(model, checkpoint, Policy(quantization), kernels), kernels)
        seconds = time.perf_counter() - start
    return {
        "quantization": quantization or "none",
        "checkpoint_bytes": checkpoint.nbytes,
        "model_bytes": report.bytes_after,
        "peak_bytes": peak.growth,
        "seconds": seconds,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id or an alias")
    parser.add_argument("--config", help="random weights of this shape instead: a config.json, or nemotron-3-nano")
    parser.add_argument("--layers", type=int, help="with --config, only this many layers")
    parser.add_argument("--only", choices=["none", "mxfp8"], help="measure this one, in this process, and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.model, None if arguments.only == "none" else arguments.only)))
    elif arguments.config:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(read_config(arguments.config, arguments.layers), Path(folder))
            cut = f", {arguments.layers} layers" if arguments.layers else ""
            compare(folder, f"load {arguments.config}{cut}, random weights")
    else:
        resolve_model(arguments.model)
        compare(arguments.model, f"load {arguments.model}")


def compare(model: str, title: str) -> None:
    """Measure both ways of loading, and print them."""
    results = [_in_own_process(model, mode) for mode in ("none", "mxfp8")]
    rows = [
        [
            item["quantization"],
            _mb(item["checkpoint_bytes"]),
            _mb(item["model_bytes"]),
            _mb(item["peak_bytes"]),
            f"{item['peak_bytes'] / item['model_bytes']:.2f}" if item["peak_bytes"] else "-",
            f"{item['seconds']:.2f}",
        ]
        for item in results
    ]
    header = ["weights", "checkpoint MB", "final MB", "peak MB", "peak / final", "seconds"]
    print_report(title, header, rows, {"rows": results})


def _in_own_process(model: str, mode: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "eightfold.benchmarks.load", "--model", model, "--only", mode]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f}"


if __name__ == "__main__":
    main()
