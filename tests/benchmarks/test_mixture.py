"""A mixture made from a dense model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eightfold.benchmarks.mixture import NOISE, write_mixture
from eightfold.errors import InputError
from eightfold.llm import LLM
from eightfold.types import SamplingParams
from tests.models.checkpoints import case, random_prompt, reference_model, save_checkpoint
from tests.models.paged_run import PagedRun, load_model


def test_experts_are_the_mlp_a_little_disturbed(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "dense")
    dense = load_file(source / "model.safetensors")
    mixture = load_file(write_mixture(source, tmp_path / "mixture", num_experts=3) / "model.safetensors")
    for part, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        for expert in range(3):
            difference = mixture[f"model.layers.1.block_sparse_moe.experts.{expert}.{theirs}.weight"] - (
                weight := dense[f"model.layers.1.mlp.{part}.weight"]
            )
            assert abs(float(difference.std() / weight.std()) / NOISE - 1) < 0.05
    assert torch.equal(mixture["model.norm.weight"], dense["model.norm.weight"])


def test_it_is_the_mixtral_that_transformers_reads(tmp_path: Path) -> None:
    source = save_checkpoint(case("llama-gqa"), tmp_path / "dense")
    folder = write_mixture(source, tmp_path / "mixture", num_experts=3)
    run = PagedRun(load_model(folder), [random_prompt(30)])
    run.step({0: 30})
    run.check(reference_model(folder))


def test_another_type_is_refused(tmp_path: Path) -> None:
    source = save_checkpoint(case("qwen2"), tmp_path / "dense")
    with pytest.raises(InputError, match="got model_type qwen2; expected llama"):
        write_mixture(source, tmp_path / "mixture", num_experts=3)


def test_a_real_one_in_mxfp8_talks_sense(smollm2_path: Path, tmp_path: Path) -> None:
    llm = LLM(write_mixture(smollm2_path, tmp_path, num_experts=4), quantization="mxfp8")
    (answer,) = llm.generate("The capital of France is", SamplingParams(max_tokens=3, temperature=0.0))
    assert "Paris" in answer.text
