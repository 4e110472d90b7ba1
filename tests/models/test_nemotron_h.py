"""Nemotron-H: every spelling is the same model, and a comparison with transformers sees what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.models.loader import LoadPlan, open_checkpoint, plan, read_model
from eightfold.models.nemotron_h import NemotronH, NemotronHArch
from eightfold.quant.policy import Policy
from tests.models.checkpoints import (
    LENGTH,
    case,
    random_prompt,
    reference_model,
    save_checkpoint,
)
from tests.models.paged_run import PagedRun, load_model

LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def load_nemotron(folder: Path, change: Callable[[NemotronHArch], NemotronHArch] = lambda arch: arch) -> NemotronH:
    """The model of a checkpoint, or one that `change` makes of its architecture."""
    found = read_model(folder)
    assert isinstance(found, NemotronH)
    model = NemotronH(change(found.arch))
    load_model(folder, model)
    return model


def with_routing(arch: NemotronHArch, **changes: Any) -> NemotronHArch:
    assert arch.mixture is not None
    return replace(arch, mixture=replace(arch.mixture, routing=replace(arch.mixture.routing, **changes)))


def with_mamba(arch: NemotronHArch, **changes: Any) -> NemotronHArch:
    assert arch.mamba is not None
    return replace(arch, mamba=replace(arch.mamba, **changes))


CHANGES: tuple[tuple[str, Callable[[NemotronHArch], NemotronHArch]], ...] = (
    ("nemotron-mixed", lambda arch: with_routing(arch, scale=1.0)),
    ("nemotron-mixed", lambda arch: with_routing(arch, normalize=False)),
    ("nemotron-plain", lambda arch: with_routing(arch, normalize=True)),
    ("nemotron-moe", lambda arch: with_routing(arch, top_k=2)),
    ("nemotron-moe", lambda arch: with_routing(arch, scoring="softmax")),
    ("nemotron-expert-groups", lambda arch: with_routing(arch, num_groups=1, topk_groups=1)),
    ("nemotron-expert-groups", lambda arch: with_routing(arch, topk_groups=1)),
    ("nemotron-mamba", lambda arch: with_mamba(arch, dt_limits=(0.2, 0.5))),
    ("nemotron-mamba", lambda arch: replace(arch, norm_eps=1.0)),
)


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_comparison_sees_a_wrong_feature(name: str, change: Callable[[NemotronHArch], NemotronHArch], tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path)
    run = PagedRun(load_nemotron(folder, change), [random_prompt(LENGTH)])
    run.step({0: LENGTH})
    with pytest.raises(AssertionError, match="not close"):
        run.check(reference_model(folder))


def pattern_as_text(config: dict[str, Any]) -> None:
    layers = config.pop("layers_block_type")
    config |= {"hybrid_override_pattern": "".join(LETTERS[word] for word in layers), "num_hidden_layers": len(layers)}


def older_words(config: dict[str, Any]) -> None:
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    config["layers_block_type"] = [words.get(word, word) for word in config["layers_block_type"]]


SPELLINGS: dict[str, Callable[[dict[str, Any]], None]] = {
    "text": pattern_as_text,
    "older words": older_words,
    "as saved": lambda config: None,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["nemotron-mixed", "nemotron-latent"])
def test_every_spelling_is_the_same_model(name: str, fused: bool, spelling: str, tmp_path: Path) -> None:
    """Experts one by one and as one tensor, `backbone.` and `model.`, and the pattern as a text or as a list of words."""
    folder = save_checkpoint(case(name), tmp_path, fused=fused)
    names = load_file(folder / "model.safetensors").keys()
    assert any(".experts.3.up_proj.weight" in item for item in names) != fused
    assert any(item.startswith("model." if fused else "backbone.") for item in names)
    reference = reference_model(folder)
    config = json.loads((folder / "config.json").read_text())
    SPELLINGS[spelling](config)
    (folder / "config.json").write_text(json.dumps(config))
    run = PagedRun(load_model(folder), [random_prompt(30)])
    run.step({0: 21})
    run.step({0: 9})
    run.check(reference)


def test_draft_heads_are_passed_over_with_one_line(tmp_path: Path) -> None:
    folder = save_checkpoint(case("nemotron-mixed"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    extra: dict[str, Tensor] = {f"mtp.layers.{index}.mixer.q_proj.weight": torch.zeros(2, 2) for index in range(3)}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    model = read_model(folder)
    assert load_plan(folder).notes == ("3 tensors are not used: heads that draft tokens ahead, for speculative decoding",)
    load_model(folder, model)


def load_plan(folder: Path) -> LoadPlan:
    return plan(read_model(folder), open_checkpoint(folder), Policy("mxfp8"), Kernels(detect("cpu"), torch.float32))
