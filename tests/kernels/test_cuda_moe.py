"""What the GPU's experts decline; tests/kernels/test_moe.py has their products."""

from __future__ import annotations

import dataclasses

import torch

from eightfold.kernels.cuda_moe import FoldMoe
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import MoeSpec

SPEC = MoeSpec("experts", 4, 2, 64, 32, False, "relu2", "mxfp8", torch.bfloat16)


def test_it_needs_a_gpu_and_quantized_experts() -> None:
    reason = FoldMoe().declines(SPEC, detect("cpu"))
    assert reason is not None
    dense = FoldMoe().declines(dataclasses.replace(SPEC, weight_format="bfloat16"), detect("cpu"))
    assert dense is not None
