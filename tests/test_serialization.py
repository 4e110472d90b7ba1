"""What is said of a checkpoint that is quantized already: what it holds, and every way in which it contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from eightfold.cli import main
from eightfold.quant.mxfp8 import ScaleRule
from eightfold.quantize import quantize_checkpoint
from eightfold.serialization import report_serialized
from tests.models.checkpoints import case, save_checkpoint
from tests.models.quantized import DIALECTS, Dialect, edit_config, rewrite, to_fp8, to_mxfp8


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_says_what_the_files_hold(dialect: Dialect, tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), dialect, ("lm_head", "layers.1"))
    report = report_serialized(tmp_path)
    assert report is not None
    assert report.dialect == dialect.removesuffix("-e8m0").removesuffix("-file")
    assert report.source == ("hf_quant_config.json" if dialect == "modelopt-file" else "config.json")
    # Three layers of seven projections, one of which is kept, and the head.
    assert report.tensors == {"MXFP8": 14, "not quantized": 8}
    assert 0.4 < report.covered < 2 / 3
    assert sorted(report.excluded.values()) == [1, 9]
    assert report.disagreements == ()


def test_what_is_not_quantized_has_no_report(tmp_path: Path) -> None:
    assert report_serialized(save_checkpoint(case("llama-gqa"), tmp_path)) is None


def test_all_disagreements_are_found(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    first, second, third = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3))

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{first}_scale_inv"]
        tensors[f"{second}_scale_inv"] = tensors[f"{second}_scale_inv"].float()
        tensors[third] = torch.ones(tensors[third].shape)

    rewrite(tmp_path, damage)
    edit_config(
        tmp_path,
        quantization_config={
            "quant_method": "mxfp8",
            "weight_block_size": [1, 32],
            "modules_to_not_convert": ["lm_head", "layers.0.self_attn.o_proj"],
        },
    )
    report = report_serialized(tmp_path)
    assert report is not None
    assert [fault.partition(":")[0].removeprefix("tensor ") for fault in report.disagreements] == [
        "model.layers.0.self_attn.o_proj.weight",
        first,
        f"{second}_scale_inv",
        third,
    ]


def test_a_tensor_without_a_place_is_a_disagreement(tmp_path: Path) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.7.strange.weight": torch.ones(2)}))
    report = report_serialized(tmp_path)
    assert report is not None
    (fault,) = report.disagreements
    assert "layers.7.strange" in fault


@pytest.mark.parametrize(
    ("scale_of", "form"),
    [("tensor", "FP8 with a scale a tensor or channel"), ("block", "FP8 in blocks of 48 x 48")],
)
def test_inspect_shows_other_fp8_as_it_is(
    scale_of: Literal["tensor", "block"], form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_fp8(save_checkpoint(case("llama-gqa"), tmp_path), scale_of)
    assert main(["inspect", str(tmp_path)]) == 0
    assert form in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--quantization", "mxfp8"]) == 2
    assert "--requantize" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--requantize"]) == 0


@pytest.mark.parametrize("rule", list(ScaleRule))
def test_inspect_finds_the_rule(rule: ScaleRule, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "source")
    quantize_checkpoint(str(source), tmp_path / "out", dialect="modelopt", rule=rule)
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["serialized"]
    assert (record["dialect"], record["rule"]) == ("modelopt", rule.value)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert f"scale rule, as the blocks show it: {rule.value}" in capsys.readouterr().out


def test_inspect_lists_disagreements_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path), "native")
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.down_proj.weight_scale_inv"))
    assert main(["inspect", str(tmp_path)]) == 2
    seen = capsys.readouterr()
    assert "disagrees: tensor model.layers.0.mlp.down_proj.weight: got no scale beside it" in seen.out
    assert "1 disagreement" in seen.err
    assert main(["inspect", str(tmp_path), "--json"]) == 2
    assert len(json.loads(capsys.readouterr().out)["serialized"]["disagreements"]) == 1
