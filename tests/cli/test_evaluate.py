"""`eightfold eval` over tiny checkpoints: its table, its files, its budget, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from eightfold.cli import main
from eightfold.cli.evaluate import parse_budget
from eightfold.errors import InputError
from tests.models.quantized import to_mxfp8
from tests.tiny_tokenizer import save_text_checkpoint

SIZES = ["--windows", "2", "--length", "40"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def words(checkpoint: Path, tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("hello world, this is a text to measure on. " * 8, encoding="utf-8")
    return ["eval", str(checkpoint), "--text", str(text), *SIZES]


def test_a_table_the_worst_layers_and_json(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "a.json"
    assert main([*words, "--json", str(saved)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("against bf16: 78 tokens of text.txt, activations in float32")
    record = json.loads(saved.read_text())
    rows = record["rows"]
    assert (rows["reference"]["kl"], rows["reference"]["same_top1"], rows["model"]["num_tokens"]) == (0.0, 1.0, 78)
    assert rows["model"]["kl"] > 1e-5
    shown = next(line.split() for line in lines if line.startswith("model  "))
    expected = (rows["model"]["perplexity"], rows["model"]["kl"], rows["model"]["same_top1"])
    assert shown[1:] == [f"{expected[0]:.3f}", f"{expected[1]:.5f}", f"{expected[2]:.4f}"]
    assert (len(record["tensors"]), len(record["layers"])) == (21, 3)
    worst = record["layers"][0]
    assert worst["sqnr_db_min"] == min(tensor["sqnr_db"] for tensor in record["tensors"])
    assert lines[-3].split()[:3] == [worst["layer"], f"{worst['sqnr_db_min']:.2f}", f"{worst['sqnr_db_mean']:.2f}"]
    assert sum(record["tensors"][0]["exponents"].values()) > 0
    assert record["environment"]["torch"]
    assert record["budget"] is None


def test_a_budget_is_found_drawn_and_usable(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    saved, keep, picture = (tmp_path / name for name in ("a.json", "keep.txt", "a.png"))
    main([*words, "--json", str(saved)])
    capsys.readouterr()
    budget = json.loads(saved.read_text())["rows"]["model"]["kl"] / 2
    further = ["--save-ignored", str(keep), "--json", str(saved), "--plot", str(picture), "--calibration-windows", "1"]
    assert main([*words, "--quantization-budget", f"KL={budget}", *further]) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(saved.read_text())
    found = record["budget"]
    assert 0 < found["kept"] < len(found["units"]) == 12
    assert sum(line.endswith("chosen") and line.split()[0] == str(found["kept"]) for line in lines) == 1
    assert lines[-1] == f"--quantization-ignored-layers {keep.read_text().strip()}"
    assert keep.read_text().strip().split(",") == found["ignored_layers"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    spared = record["rows"]["with layers kept"]
    assert main([*words, "--quantization-ignored-layers", keep.read_text().strip(), "--json", str(saved)]) == 0
    assert json.loads(saved.read_text())["rows"]["model"] == spared


def test_what_is_quantized_in_its_files(words: list[str], checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "mx"))
    to_mxfp8(folder, "modelopt")
    online, stored = tmp_path / "online.json", tmp_path / "stored.json"
    assert main([*words, "--json", str(online)]) == 0
    words[1] = str(folder)
    assert main(words) == 2
    assert main([*words, "--against", str(checkpoint), "--json", str(stored)]) == 0
    first, second = (json.loads(file.read_text()) for file in (online, stored))
    assert second["rows"]["model"]["kl"] == pytest.approx(first["rows"]["model"]["kl"], rel=1e-5)
    assert {item["name"]: item["exponents"] for item in first["tensors"]} == {
        item["name"]: item["exponents"] for item in second["tensors"]
    }


def test_nothing_quantized_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--quantization-ignored-layers", "model"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is quantized"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--length", "200"], "--length: got 200; expected at most 128"),
        (["--windows", "900"], "text: got "),
        (["--text", "/gone/text"], "--text: got [Errno 2]"),
        (["--against", "/gone/folder"], "model: got '/gone/folder'"),
        (["--save-ignored", "x"], "--save-ignored: got it without --quantization-budget"),
        (["--quantization-budget", "0.01"], "--quantization-budget: got 0.01; expected KL= and a number of nats"),
        (["--json", "/gone/a.json"], "--json: got [Errno 2]"),
    ],
)
def test_refusals(extra: list[str], message: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, *extra]) == 2
    assert capsys.readouterr().err.startswith(f"eightfold: {message}")


def test_without_matplotlib_nothing_is_measured_first(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*words, "--plot", "a.png"]) == 2
    captured = capsys.readouterr()
    assert 'pip install "eightfold[bench]"' in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("text", ["KL=-1", "KL=nan", "KL=inf", "KL=", "PPL=1", "", "KL 0.1"])
def test_a_budget_that_is_none(text: str) -> None:
    with pytest.raises(InputError, match="--quantization-budget"):
        parse_budget(text)


def test_a_budget_that_is_one() -> None:
    assert (parse_budget("KL=0.01"), parse_budget("kl=1e-3"), parse_budget("KL=0")) == (0.01, 0.001, 0.0)
