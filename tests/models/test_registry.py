"""The table of supported model types."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import eightfold.layers
import eightfold.models
from eightfold.errors import CheckpointError
from eightfold.layers.linear import Linear
from eightfold.layers.module import Module
from eightfold.layers.moe import Experts
from eightfold.models.decoder import Decoder
from eightfold.models.families import DECODER_FAMILIES
from eightfold.models.granite_hybrid import GraniteHybrid
from eightfold.models.nemotron_h import NemotronH
from eightfold.models.registry import FAMILIES, family_of
from eightfold.quant.policy import Role
from tests.models.checkpoints import CASES, Case, random_prompt, save_checkpoint
from tests.models.paged_run import PagedRun, load_model


def test_every_family_is_in_it_and_has_a_tiny_checkpoint() -> None:
    assert DECODER_FAMILIES.keys() < FAMILIES.keys()
    assert {case.make_config().model_type for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_reads_and_builds(model_type: str) -> None:
    config = next(case.make_config() for case in CASES if case.make_config().model_type == model_type)
    model = family_of(config.to_dict()).build(config.to_dict())
    assert isinstance(model, Decoder | NemotronH | GraniteHybrid)
    assert len(model.layers) == config.num_hidden_layers == len(model.arch.layout.attends)
    assert model.arch.model_type == model_type


@pytest.mark.parametrize(
    ("model_type", "stored", "canonical"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.11.w1.weight", "model.layers.0.mlp.experts.11.gate_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2.weight", "model.layers.0.mlp.experts.1.down_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w3.weight", "model.layers.0.mlp.experts.1.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("nemotron_h", "model.layers.0.mixer.D", "backbone.layers.0.mixer.D"),
        ("nemotron_h", "backbone.layers.0.mixer.D", "backbone.layers.0.mixer.D"),
    ],
)
def test_names_in_files_become_those_of_the_model(model_type: str, stored: str, canonical: str) -> None:
    assert FAMILIES[model_type].canonical(stored) == canonical


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, r"got 'lama'; expected one of: llama, .*Did you mean llama\?"),
        ({"model_type": "nemotron"}, r"got 'nemotron'; expected one of: .*Did you mean nemotron_h\?"),
        ({}, "model_type: got None"),
        ({"model_type": ["llama"]}, r"model_type: got \['llama'\]"),
    ],
)
def test_an_unsupported_type_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(config)


def cases_by_family() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = defaultdict(list)
    for item in CASES:
        found[item.make_config().model_type].append(item)
    return found


def classes_of(base: type[Module]) -> set[type[Module]]:
    """A class and all that extend it, wherever under layers and models they are."""
    for package in (eightfold.layers, eightfold.models):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    below = {base}
    while more := {child for cls in below for child in cls.__subclasses__()} - below:
        below |= more
    return below


def modules_of(item: Case) -> list[Module]:
    config: dict[str, Any] = item.make_config().to_dict()
    return list(family_of(config).build(config).modules())


@pytest.mark.parametrize("base", [Linear, Experts])
def test_fault_1_no_class_is_left_out_of_these_tests(base: type[Module]) -> None:
    used = {type(module) for item in CASES for module in modules_of(item)}
    assert classes_of(base) <= used


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fault_1_a_bf16_checkpoint_is_served_in_mxfp8_by_every_class(model_type: str, tmp_path: Path) -> None:
    for item in cases_by_family()[model_type]:
        model = load_model(save_checkpoint(item, tmp_path / item.name, dtype=torch.bfloat16), quantization="mxfp8")
        quantized = [module for module in model.modules() if isinstance(module, Experts) or _is_projection(module)]
        assert quantized
        for module in quantized:
            assert module.chosen, f"{item.name}: {type(module).__name__} has no backend"
            assert all(chosen.operation.endswith("mxfp8") for chosen in module.chosen)
        run = PagedRun(model, [random_prompt(9)])
        run.step({0: 9})
        assert run.logits[0][0].isfinite().all()


def _is_projection(module: Module) -> bool:
    return isinstance(module, Linear) and module.weight.role is Role.LINEAR


@pytest.mark.parametrize("gated", [False, True])
def test_fault_2_experts_have_the_rows_that_their_activation_takes_and_no_more(gated: bool) -> None:
    all_experts = [module for item in CASES for module in modules_of(item) if isinstance(module, Experts)]
    shapes = [(experts.w13.shape, experts.w2.shape) for experts in all_experts if experts.gated is gated]
    assert shapes
    for (num_experts, rows, in_features), down in shapes:
        assert down == (num_experts, in_features, rows // 2 if gated else rows)
