"""The rows of the quality table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from eightfold.benchmarks.perplexity import RoundedActivations, main, rows, windows_of
from eightfold.errors import InputError
from eightfold.evaluate import evaluate
from eightfold.kernels.reference import ReferenceLinear
from eightfold.quant.mxfp8 import dequantize, quantize
from tests.models.checkpoints import case, random_prompt, save_checkpoint


class Characters:
    """A tokenizer that has a token for each character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def test_windows_are_consecutive_and_equal() -> None:
    windows = windows_of("abcdefghij" * 9, Characters(), num_windows=3, length=4)
    assert ["".join(map(chr, window)) for window in windows] == ["abcd", "efgh", "ijab"]


def test_rows_are_ordered_by_what_they_round(tmp_path: Path) -> None:
    loaders = rows(save_checkpoint(case("llama-gqa"), tmp_path))
    reference = loaders["as stored"]()
    windows = [random_prompt(40, seed=seed) for seed in range(3)]
    kl = {name: evaluate(load(), reference, windows).kl for name, load in loaders.items()}
    assert abs(kl["as stored"]) < 1e-6
    assert kl["mxfp8 ceil"] > 1e-5
    assert abs(kl["mxfp8 ceil, folded"] - kl["mxfp8 ceil"]) < 1e-5
    assert kl["mxfp8 ceil, folded, fp8 activations"] > kl["mxfp8 ceil, folded"]


def test_activations_are_rounded_to_fp8_with_a_scale_a_token() -> None:
    backend = RoundedActivations(ReferenceLinear())
    weight, x = quantize(torch.randn(3, 64)), torch.randn(5, 64)
    found = backend.run(x, backend.prepare(weight, None))
    scale = x.abs().amax(dim=1, keepdim=True) / 448
    expected = ((x / scale).to(torch.float8_e4m3fn).float() * scale) @ dequantize(weight).T
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="text: got 11 tokens; expected at least 12: 3 windows of 4"):
        windows_of("abcdefghijk", Characters(), num_windows=3, length=4)


def test_the_command_prints_a_table_and_one_json_line_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = save_checkpoint(case("llama-gqa"), tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("abcdefghijklmnopqrstuvwxyz" * 2, encoding="utf-8")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda _folder: Characters())
    command = ["perplexity", "--model", str(folder), "--text", str(text), "--windows", "2", "--length", "20"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(Characters, "encode", lambda _self, text, **_: [ord(character) - ord("a") for character in text])
    main()
    *table, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["tokens"] == 38
    for name, values in found["rows"].items():
        line = next(line for line in table if line.startswith(f"{name}  "))
        assert line.split()[-3:] == [f"{values['perplexity']:.3f}", f"{values['kl']:.5f}", f"{values['same_top1']:.4f}"]
