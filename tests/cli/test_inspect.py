"""`eightfold inspect` over a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eightfold.cli import main
from tests.tiny_tokenizer import save_text_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_inspect_lists_every_tensor_and_totals(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    by_name = {tensor["name"]: tensor for tensor in report["tensors"]}
    down = by_name["model.layers.0.mlp.down_proj.weight"]
    assert down["quantized"]
    assert 25 < down["sqnr_db"] < 40
    assert not by_name["lm_head.weight"]["quantized"]
    assert report["totals"]["quantized"] == 21
    assert report["totals"]["bytes_after"] == sum(tensor["bytes_after"] for tensor in report["tensors"])
    assert main(["inspect", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in by_name)
    assert any(line.startswith("21 tensors quantized") for line in lines)
    assert any(line.startswith("linear mxfp8:") for line in lines)
    assert any(line.startswith("SQNR") and line.endswith("at worst") for line in lines)
