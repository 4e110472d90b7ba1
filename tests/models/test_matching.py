"""Which tensor fills which part, and how faults are collected where loading would stop at the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eightfold.errors import CheckpointError
from eightfold.models.loader import open_checkpoint, read_model
from eightfold.models.matching import account_for_rest, match_part, survey, tied_names
from eightfold.quant.policy import Role
from tests.models.checkpoints import case, save_checkpoint
from tests.models.quantized import edit_config, rewrite

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied", "mixtral", "nemotron-mixed"])
def test_a_survey_of_a_sound_checkpoint_finds_every_tensor_once(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path)
    model, checkpoint = read_model(folder), open_checkpoint(folder)
    found, faults = survey(model, checkpoint)
    assert faults == ()
    names = [stored.info.name for _, stored in found]
    assert sorted(names) == sorted(set(names))
    assert set(names) == set(checkpoint.tensors) - set(tied_names(model))
    assert {role for role, _ in found} >= {Role.LINEAR, Role.NORM, Role.EMBEDDING}


def test_a_survey_goes_on_after_a_fault(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    rewrite(folder, lambda tensors: (tensors.pop(UP), tensors.update({"model.norm.weight": torch.ones(3)})))
    found, faults = survey(read_model(folder), open_checkpoint(folder))
    assert [str(fault).partition(":")[0] for fault in faults] == [f"tensor {UP}", "tensor model.norm.weight"]
    assert UP.replace("up", "gate") in {stored.info.name for _, stored in found}


def test_tensors_without_a_place_need_a_reason(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-tied"), tmp_path)
    model, checkpoint = read_model(folder), open_checkpoint(folder)
    tied = tied_names(model)
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    used = set(checkpoint.tensors) - {UP}
    with pytest.raises(CheckpointError, match=f"^1 tensor without a place in the model: got {UP}; expected none"):
        account_for_rest(checkpoint, used, tied)
    assert account_for_rest(checkpoint, used | {UP}, tied) == {}
    assert account_for_rest(checkpoint, used, {UP: "another"}) == {UP: "tied to another"}


def test_a_shape_of_another_configuration_is_named(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    checkpoint = open_checkpoint(folder)
    edit_config(folder, intermediate_size=32)
    weight = next(weight for weight in read_model(folder).weights() if any(part.name == UP for part in weight.parts))
    part = next(part for part in weight.parts if part.name == UP)
    with pytest.raises(CheckpointError, match=rf"^tensor {UP}: got shape \[96, 64\]; expected \[32, 64\], by config.json"):
        match_part(checkpoint, weight, part)
