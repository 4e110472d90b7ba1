"""`eightfold quantize`: a folder that serves, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from eightfold.cli import BAD_INPUT, main
from eightfold.models.loader import read_tensors
from eightfold.quant.mxfp8 import MXTensor
from tests.models.checkpoints import case, save_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(case("llama-gqa"), tmp_path_factory.mktemp("source"))


def test_it_writes_and_says_what(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = ["--format", "modelopt", "--ignore", "layers.0,down_proj", "--max-shard-size", "30KB", "--rule", "floor"]
    assert main(["quantize", str(source), str(out), *flags]) == 0
    printed = capsys.readouterr().out
    assert f"{len(list(out.glob('*.safetensors')))} files of weights" in printed
    quantized = [name for name, value in read_tensors(out) if isinstance(value, MXTensor)]
    assert len(quantized) == 12
    assert not any("layers.0." in name or "down_proj" in name for name in quantized)
    assert "12 in MXFP8" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "gguf"], "format: got gguf; expected one of: native, modelopt, compressed-tensors"),
        (["--rule", "round"], "--rule: got round; expected one of: ceil, floor"),
        (["--max-shard-size", "big"], "--max-shard-size: got big; expected a size"),
        (["--ignore", "nowhere"], "quantization_ignored_layers: got nowhere, which matches no layer"),
    ],
)
def test_refusals(flags: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(source), str(tmp_path / "out"), *flags]) == BAD_INPUT
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
