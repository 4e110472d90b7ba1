"""Kernels and filled weights for the tests of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.kernels.storage import Arena
from eightfold.layers.module import Module
from eightfold.quant.mxfp8 import ScaleRule
from eightfold.quant.policy import Policy


def kernels(**names: Any) -> Kernels:
    return Kernels(detect("cpu"), torch.float32, **names)


def fill(
    module: Module, quantization: str | None = None, *, seed: int = 0, quantize_lm_head: bool = False
) -> dict[str, Tensor]:
    """Load random values into every weight, as the policy says; returns the values by the checkpoint's names."""
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(quantization, quantize_lm_head=quantize_lm_head)
    values: dict[str, Tensor] = {}
    for weight in module.weights():
        decision = policy.decide(weight.role, weight.layers)
        for part in weight.parts:
            fresh = torch.randn(part.shape, generator=generator)
            value = values.setdefault(part.name, fresh)
            weight.load(
                part, value, decision=decision, rule=ScaleRule.CEIL, dtype=torch.float32, arena=Arena(torch.device("cpu"))
            )
    return values
