"""`eightfold quantize`: a folder that serves, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from eightfold.cli import BAD_INPUT, main
from eightfold.models.loader import read_tensors
from eightfold.quant.mxfp8 import MXTensor
from tests.models.checkpoints import case, save_checkpoint
from tests.tiny_tokenizer import save_text_checkpoint


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


def test_a_k_that_others_do_not_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_checkpoint(case("llama-odd-80"), tmp_path / "source")
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 0
    assert "a K that is no multiple of 32, as model.layers.0." in capsys.readouterr().err


def test_the_card_has_the_measured_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_text_checkpoint(tmp_path / "source")
    assert main(["quantize", str(source), str(tmp_path / "out"), "--measure"]) == 0
    printed = {line[:20].strip(): line[20:].strip() for line in capsys.readouterr().out.splitlines()}
    assert 0 < float(printed["KL divergence"].split()[0]) < 0.1
    card = (tmp_path / "out" / "README.md").read_text()
    for name in ("measured on", "perplexity", "KL divergence", "same likeliest token"):
        assert any(line.startswith(f"| {name} | ") for line in card.splitlines())
    again = str(tmp_path / "again")
    assert main(["quantize", str(tmp_path / "out"), again, "--format", "modelopt", "--measure"]) == BAD_INPUT
    assert "--measure: got" in capsys.readouterr().err
    assert not Path(again).exists()


def test_a_rule_for_bits_that_are_kept_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 0
    flags = ["--rule", "floor", "--format", "modelopt"]
    assert main(["quantize", str(tmp_path / "out"), str(tmp_path / "again"), *flags]) == BAD_INPUT
    assert "scale_rule: got floor for weights that are in MXFP8 already, whose bits are kept" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "out"), "--scale-rule", "floor"]) == BAD_INPUT
