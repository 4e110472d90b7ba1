from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from eightfold.benchmarks.moe import SHAPES


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "eightfold.benchmarks.moe"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    assert "GPU" in result.stderr


def test_the_shapes_are_those_of_the_models() -> None:
    nemotron = SHAPES["nemotron"].spec
    assert (nemotron.num_experts, nemotron.top_k, nemotron.in_features, nemotron.intermediate_size) == (128, 6, 2688, 1856)
    assert (nemotron.gated, nemotron.activation) == (False, "relu2")
    assert (SHAPES["qwen3"].spec.gated, SHAPES["qwen3"].spec.activation) == (True, "silu")
