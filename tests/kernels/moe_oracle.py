"""Experts in an fp64 loop, operands for them, and faults: what every backend of theirs is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eightfold.kernels.operations import MoeBackend, MoeSpec
from eightfold.quant.mxfp8 import MXTensor, dequantize, quantize
from tests.kernels.mamba_oracle import randn

NUM_EXPERTS, TOP_K = 6, 3


@dataclass(frozen=True)
class Experts:
    """The weights of a layer, as they are stored."""

    w13: MXTensor | Tensor
    w2: MXTensor | Tensor
    spec: MoeSpec


@dataclass(frozen=True)
class Call:
    """The operands of one call.

    Attributes:
        experts: the layer.
        x: `[T, K]`.
        ids: `[T, TOP_K]`.
        weights: `[T, TOP_K]`.
    """

    experts: Experts
    x: Tensor
    ids: Tensor
    weights: Tensor

    def run(self, backend: MoeBackend) -> Tensor:
        prepared = backend.prepare(self.experts.w13, self.experts.w2, self.experts.spec)
        return backend.run(self.x, self.ids, self.weights, prepared)


def dense(weight: MXTensor | Tensor) -> Tensor:
    return dequantize(weight) if isinstance(weight, MXTensor) else weight.float()


def experts_of(
    *, gated: bool, width: int = 56, k: int = 40, weight_format: str = "mxfp8", dtype: torch.dtype = torch.float32
) -> Experts:
    def stored(weight: Tensor) -> MXTensor | Tensor:
        return quantize(weight) if weight_format == "mxfp8" else weight.to(getattr(torch, weight_format))

    spec = MoeSpec("m", NUM_EXPERTS, TOP_K, k, width, gated, "silu" if gated else "relu2", weight_format, dtype)
    rows = 2 * width if gated else width
    return Experts(stored(randn(NUM_EXPERTS, rows, k)), stored(randn(NUM_EXPERTS, k, width, seed=1)), spec)


def call_of(experts: Experts, num_tokens: int) -> Call:
    """Random tokens, each with TOP_K different experts."""
    x = randn(num_tokens, experts.spec.in_features, seed=2).to(experts.spec.activation_dtype)
    ids = randn(num_tokens, NUM_EXPERTS, seed=3).argsort(dim=1)[:, :TOP_K]
    return Call(experts, x, ids, randn(num_tokens, TOP_K, seed=4).abs())


def by_formula(call: Call) -> tuple[Tensor, Tensor]:
    """One token and one of its experts at a time in fp64, and the magnitude behind each element."""
    w13, w2 = dense(call.experts.w13).double(), dense(call.experts.w2).double()
    width = call.experts.spec.intermediate_size
    out, magnitude = torch.zeros(call.x.shape).double(), torch.zeros(call.x.shape).double()
    for token, chosen in enumerate(call.ids.tolist()):
        for choice, expert in enumerate(chosen):
            share, row = float(call.weights[token, choice]), call.x[token].double()
            inner, behind = w13[expert] @ row, w13[expert].abs() @ row.abs()
            if call.experts.spec.gated:
                inner = inner[:width] / (1 + torch.exp(-inner[:width])) * inner[width:]
                behind = behind[:width] * behind[width:]
            else:
                inner, behind = inner.clamp(min=0) ** 2, behind**2
            out[token] += share * (w2[expert] @ inner)
            magnitude[token] += abs(share) * (w2[expert].abs() @ behind)
    return out, magnitude


def _gate_and_up_swapped(call: Call) -> Call:
    weight, half = call.experts.w13, call.experts.spec.intermediate_size
    if isinstance(weight, MXTensor):
        data = weight.data.view(torch.uint8).roll(half, 1).view(weight.data.dtype)
        return replace(call, experts=replace(call.experts, w13=MXTensor(data, weight.scale.roll(half, 1))))
    return replace(call, experts=replace(call.experts, w13=weight.roll(half, 1)))


def _one_choice_off(call: Call) -> Call:
    ids = call.ids.clone()
    ids[3, 1] = next(expert for expert in range(NUM_EXPERTS) if expert not in ids[3])
    return replace(call, ids=ids)


FAULTS: dict[str, Callable[[Call], Call]] = {
    "gate and up swapped": _gate_and_up_swapped,
    "an expert off by one": lambda call: replace(call, ids=(call.ids + 1) % NUM_EXPERTS),
    "another expert for one choice of one token": _one_choice_off,
    "weights of the wrong choices": lambda call: replace(call, weights=call.weights.flip(1)),
    "weights of the wrong tokens": lambda call: replace(call, weights=call.weights.roll(1, 0)),
    "no weights": lambda call: replace(call, weights=torch.ones_like(call.weights)),
    "a choice left out": lambda call: replace(call, ids=call.ids[:, :-1], weights=call.weights[:, :-1]),
    "all times 1.02": lambda call: replace(call, weights=1.02 * call.weights),
}
"""Faults that a comparison of gated experts, of more than three tokens, must notice."""
