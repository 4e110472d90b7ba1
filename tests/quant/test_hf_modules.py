"""Modules of transformers whose weights are in MXFP8: products of the widened weights, through casts and copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from eightfold.quant.hf_modules import SCALE_SUFFIX, QuantizedExperts, QuantizedLinear, hold, kind_of
from eightfold.quant.mxfp8 import MXTensor, dequantize, quantize
from eightfold.quant.policy import Role


class Stacked(nn.Module):
    """Experts as transformers has them, without a gate."""

    has_gate = is_transposed = has_bias = has_post_expert_norm = False

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(5, 40, 24))
        self.down_proj = nn.Parameter(torch.randn(5, 24, 40))
        self.act_fn = nn.ReLU()


class Gated(Stacked):
    has_gate = True

    def __init__(self) -> None:
        super().__init__()
        del self.up_proj
        self.gate_up_proj = nn.Parameter(torch.randn(5, 80, 24))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.sigmoid(gate) * up


def held(module: nn.Module, *names: str) -> tuple[Any, dict[str, MXTensor]]:
    """The module with its weights in MXFP8, and these."""
    mx = {name: quantize(getattr(module, name).detach()) for name in names}
    hold(module, names)
    for name, value in mx.items():
        assert getattr(module, name).is_meta
        setattr(module, name, nn.Parameter(value.data, requires_grad=False))
        setattr(module, name + SCALE_SUFFIX, nn.Parameter(value.scale, requires_grad=False))
    return module, mx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [64, 49])
def test_a_product_is_that_of_the_widened_weight(k: int, dtype: torch.dtype) -> None:
    module, mx = held(nn.Linear(k, 7), "weight")
    x = torch.randn(2, 3, k, dtype=dtype)
    module.to(dtype)
    assert type(module) is QuantizedLinear
    assert torch.equal(module(x), functional.linear(x, dequantize(mx["weight"], dtype), module.bias))


@pytest.mark.parametrize("kind", [Stacked, Gated])
def test_experts_are_those_that_each_token_chose(kind: type[Stacked]) -> None:
    names = ("gate_up_proj" if kind is Gated else "up_proj", "down_proj")
    module, mx = held(kind(), *names)
    assert isinstance(module, QuantizedExperts)
    assert isinstance(module, kind)
    x, weights = torch.randn(6, 24), torch.rand(6, 2)
    chosen = torch.tensor([[0, 1], [1, 2], [4, 0], [2, 1], [0, 4], [1, 0]])  # number 3 is chosen by none
    expected = torch.zeros(6, 24)
    for token in range(6):
        for choice in range(2):
            first, second = (dequantize(mx[name][int(chosen[token, choice])]) for name in names)
            inner = first @ x[token]
            inner = torch.sigmoid(inner[:40]) * inner[40:] if kind is Gated else inner.relu()
            expected[token] += weights[token, choice] * (second @ inner)
    torch.testing.assert_close(module(x, chosen, weights), expected, rtol=1e-5, atol=1e-4)


def test_a_cast_changes_the_bias_and_no_bit_of_the_weight() -> None:
    module, mx = held(nn.Linear(48, 8), "weight")
    for cast in (module.half, module.bfloat16, module.double, lambda: module.to(torch.float32)):
        cast()
        assert torch.equal(module.weight.view(torch.uint8), mx["weight"].data.view(torch.uint8))
        assert torch.equal(module.weight_scale_inv, mx["weight"].scale)
    assert module.bias.dtype == torch.float32
    assert torch.equal(copy.deepcopy(module)(torch.ones(48)), module(torch.ones(48)))


def test_gradients_reach_the_input() -> None:
    module, mx = held(nn.Linear(48, 8, bias=False), "weight")
    x = torch.randn(2, 48, requires_grad=True)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, dequantize(mx["weight"]).sum(dim=0).expand(2, 48))


def test_kinds() -> None:
    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return super().forward(input) * 2

    linear, stacked = nn.Linear(4, 4), Stacked()
    assert kind_of("a.q_proj", linear, None) == (Role.LINEAR, ("weight",), "")
    assert kind_of("a.gate_proj", linear, None)[0] is Role.LINEAR
    assert kind_of("a.gate", linear, None)[0] is Role.ROUTER
    assert kind_of("a.router.layer", linear, None)[0] is Role.ROUTER
    assert kind_of("lm_head", linear, linear)[0] is Role.HEAD
    assert kind_of("a", Odd(4, 4), None)[2] == "Odd, which multiplies in its own way"
    assert kind_of("a.experts", stacked, None) == (Role.EXPERTS, ("up_proj", "down_proj"), "")
    assert kind_of("a.experts", Gated(), None) == (Role.EXPERTS, ("gate_up_proj", "down_proj"), "")
    assert kind_of("a.conv1d", nn.Conv1d(4, 4, 3), None)[1] == ()
    assert kind_of("a.embed", nn.Embedding(4, 4), None)[1] == ()
    stacked.is_transposed = True
    assert kind_of("a.experts", stacked, None)[2] == "Stacked with up_proj, down_proj"
