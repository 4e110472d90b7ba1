"""Experts on a CPU: the native product, for one expert after another, over the tokens that chose it.

With few tokens a step is bound by the bytes of the experts that were chosen, each of which is read once. Weights stay where
they were loaded: an expert is a view.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.cpu import CpuFused, CpuLinear, CpuWeight
from eightfold.kernels.operations import LinearSpec, MoeSpec
from eightfold.kernels.reference_mixers import activate
from eightfold.kernels.registry import Hardware
from eightfold.quant.fp8 import WeightTensor


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """Both products of each expert.

    Attributes:
        up: of each expert `[2 I, K]`, or `[I, K]` where it is not gated.
        down: of each expert `[K, I]`.
        spec: what was asked when this backend was chosen.
    """

    up: tuple[CpuWeight, ...]
    down: tuple[CpuWeight, ...]
    spec: MoeSpec


class CpuMoe:
    """The sum over a token's experts of weight * W2 a(W13 x), experts one after another."""

    name = "cpu"

    def __init__(self) -> None:
        self._linear = CpuLinear()
        self._fused = CpuFused()

    def declines(self, spec: MoeSpec, hardware: Hardware) -> str | None:
        """Takes what `CpuLinear` takes."""
        product = LinearSpec(spec.layer, spec.intermediate_size, spec.in_features, spec.weight_format, spec.activation_dtype)
        return self._linear.declines(product, hardware)

    def prepare(self, w13: WeightTensor, w2: WeightTensor, spec: MoeSpec) -> CpuExperts:
        """Views of the loaded weights; raises as `CpuLinear.prepare`."""
        up, down = (
            tuple(self._linear.prepare(weight[expert], None) for expert in range(spec.num_experts)) for weight in (w13, w2)
        )
        return CpuExperts(up, down, spec)

    def run(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, prepared: CpuExperts) -> Tensor:
        """See `MoeBackend.run`."""
        spec, top_k = prepared.spec, expert_ids.shape[1]
        chosen = expert_ids.flatten()
        order = chosen.argsort(stable=True)  # pairs of token and choice, by expert
        counts = torch.bincount(chosen, minlength=spec.num_experts).tolist()
        said = torch.empty((chosen.numel(), x.shape[1]), dtype=torch.float32)
        begin = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            pairs = order[begin : begin + count]
            begin += count
            inner = self._activate(self._linear.run(x[pairs // top_k], prepared.up[expert]), spec)
            said[pairs] = self._linear.run(inner, prepared.down[expert]).float()
        return _weighted_sum(said.view(*expert_ids.shape, x.shape[1]), expert_weights).to(x.dtype)

    def _activate(self, x: Tensor, spec: MoeSpec) -> Tensor:
        if spec.gated and spec.activation == "silu":
            return self._fused.silu_and_mul(x)
        return activate(x, spec)


def _weighted_sum(said: Tensor, weights: Tensor) -> Tensor:
    """`[T, K]` from what each choice says `[T, top_k, K]`, in fp32 and in the order of the choice."""
    total = weights[:, 0, None] * said[:, 0]
    for choice in range(1, said.shape[1]):
        total += weights[:, choice, None] * said[:, choice]
    return total
