"""Multilayer perceptrons against their formulas."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels.operations import Activation
from eightfold.layers.mlp import MLP, activate
from tests.layers.helpers import fill, kernels

HIDDEN, WIDTH = 40, 33


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_the_formula(gated: bool, bias: bool) -> None:
    mlp = MLP("m", HIDDEN, WIDTH, activation="silu" if gated else "relu2", gated=gated, bias=bias)
    values = fill(mlp)
    mlp.bind(kernels())
    x = torch.randn(5, HIDDEN)

    def project(part: str, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ values[f"m.{part}_proj.weight"].T + values.get(f"m.{part}_proj.bias", torch.zeros(1))

    inner = torch.nn.functional.silu(project("gate", x)) * project("up", x) if gated else project("up", x).relu().square()
    torch.testing.assert_close(mlp(x), project("down", inner), rtol=1e-4, atol=1e-3)
    assert ("m.gate_proj.weight" in values) == gated


@pytest.mark.parametrize(("activation", "gated"), [("silu", False), ("relu2", True)])
def test_what_no_operation_computes_is_an_error(activation: Activation, gated: bool) -> None:
    with pytest.raises(ValueError, match=f"there is no operation for {activation} with"):
        activate(kernels().fused().backend, torch.ones(1, 2), activation, gated=gated)
