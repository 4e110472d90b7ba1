"""`eightfold diff` over tiny checkpoints: what it lists, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eightfold.cli import main
from tests.models.checkpoints import case, save_checkpoint
from tests.models.quantized import rewrite, to_mxfp8

NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    a, b = (save_checkpoint(case("llama-gqa"), tmp_path / name) for name in "ab")
    return a, b


def test_equal_checkpoints_exit_with_zero(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair
    to_mxfp8(a, "native")
    to_mxfp8(b, "modelopt")
    assert main(["diff", str(a), str(b)]) == 0
    assert capsys.readouterr().out.splitlines() == ["30 tensors: 30 same bits", "equal"]
    assert main(["diff", str(a), str(b), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 33
    assert lines[0].split() == ["shape", "A", "B", "SQNR", "dB", "largest", "outcome", "tensor"]
    assert sum(line.endswith(DOWN) and "exact" in line for line in lines) == 1


def test_different_ones_exit_with_one_and_are_listed(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair
    to_mxfp8(b, "native")
    rewrite(b, lambda tensors: tensors.pop(NORM))
    assert main(["diff", str(a), str(b)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[-1] == DOWN and "mxfp8" in line and "different" in line for line in lines) == 1
    assert sum(line.endswith(f"only in A      {NORM}") for line in lines) == 1
    assert lines[-3] == "30 tensors: 8 same bits, 21 different, 1 only in A"
    assert lines[-2].startswith("most different: model.layers.")
    assert lines[-1] == "different"
    assert main(["diff", str(a), str(b), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["counts"] == {"same bits": 8, "different": 21, "only in A": 1}
    by_name = {item["name"]: item for item in report["tensors"]}
    assert 28 < by_name[DOWN]["sqnr_db"] < 36
    assert by_name[NORM] == {
        "name": NORM,
        "outcome": "only in A",
        "forms": ["f32", ""],
        "shapes": [[64], None],
        "sqnr_db": None,
        "max_difference": None,
    }


def test_errors_exit_with_two(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair
    assert main(["diff", str(a), str(tmp_path / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    (b / "model.safetensors").write_bytes(b"damaged")
    assert main(["diff", str(a), str(b)]) == 2
    assert "damaged file" in capsys.readouterr().err
