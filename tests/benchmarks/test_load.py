"""The benchmark of loading, run on a tiny checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from eightfold.benchmarks.load import measure
from tests.models.checkpoints import case, save_checkpoint


def test_it_prints_both_rows_and_one_json_line(tmp_path: Path) -> None:
    save_checkpoint(case("llama-gqa"), tmp_path)
    command = [sys.executable, "-m", "eightfold.benchmarks.load", "--model", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = {row["quantization"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows["none"]["model_bytes"] == rows["none"]["checkpoint_bytes"] == rows["mxfp8"]["checkpoint_bytes"]
    assert rows["mxfp8"]["model_bytes"] < 0.6 * rows["none"]["model_bytes"]


def test_a_measurement_counts_what_was_loaded(tmp_path: Path) -> None:
    save_checkpoint(case("llama-tied"), tmp_path)
    found = measure(str(tmp_path), "mxfp8")
    assert found["seconds"] > 0
    assert 0 < found["model_bytes"] < found["checkpoint_bytes"]


def test_a_shape_with_random_weights(tmp_path: Path) -> None:
    save_checkpoint(case("nemotron-mixed"), tmp_path)
    command = [sys.executable, "-m", "eightfold.benchmarks.load", "--config", str(tmp_path / "config.json"), "--layers", "3"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "config.json, 3 layers, random weights" in done.stdout
    rows = {row["quantization"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    assert rows["mxfp8"]["model_bytes"] < 0.8 * rows["none"]["model_bytes"]
