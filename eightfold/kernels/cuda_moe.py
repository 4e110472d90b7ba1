"""The GPU's backend for experts: `fold`. The kernels and what bounds them are in `moe.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.cuda import HOPPER, declines_fold, declines_values
from eightfold.kernels.moe import FoldedExperts, choose_tile, moe_gemm, sort_pairs, sum_choices
from eightfold.kernels.operations import MoeSpec
from eightfold.kernels.quantize import fold_mxfp8, quantize_tokens
from eightfold.kernels.registry import Hardware
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import SCALE_BIAS, MXTensor


@dataclass(frozen=True, slots=True)
class FoldMoeWeights:
    """What `FoldMoe.prepare` makes.

    Attributes:
        w13: gates and ups, or ups alone.
        w2: back to the width of the tokens.
        spec: what was asked.
        overlap: whether that GPU lets a launch begin before the kernel ahead of it ends.
    """

    w13: FoldedExperts
    w2: FoldedExperts
    spec: MoeSpec
    overlap: bool


class FoldMoe:
    """Experts under one power of two a row, tokens in FP8 with a scale each, and so what is between the two products."""

    name = "fold"

    def declines(self, spec: MoeSpec, hardware: Hardware) -> str | None:
        """Needs what `fold` needs for a dense product, of both weights."""
        reason = declines_fold(spec.weight_format, spec.activation_dtype, hardware)
        if reason is not None or spec.weights is None:
            return reason or jit.MISSING
        return next((reason for weight in spec.weights if (reason := declines_values(_flat(weight)))), jit.MISSING)

    def prepare(self, w13: WeightTensor, w2: WeightTensor, spec: MoeSpec) -> FoldMoeWeights:
        """Fold both; their MXFP8 forms are not kept."""
        if not isinstance(w13, MXTensor) or not isinstance(w2, MXTensor):
            raise TypeError("fold takes experts in MXFP8")
        overlap = torch.cuda.get_device_capability(w13.data.device) >= HOPPER
        return FoldMoeWeights(_fold(w13), _fold(w2), spec, overlap)

    def run(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, prepared: FoldMoeWeights) -> Tensor:
        """y `[T, K]` from x `[T, K]` in bf16 or fp16; shapes as in `MoeBackend.run`."""
        if x.shape[0] == 0:
            return torch.empty_like(x)
        spec, overlap, top_k = prepared.spec, prepared.overlap, expert_ids.shape[1]
        tile = choose_tile(expert_ids.numel(), spec.num_experts, gated=spec.gated)
        pairs = sort_pairs(expert_ids, spec.num_experts, tile.block_m, overlap=overlap)
        a, scale = quantize_tokens(x if x.stride(1) == 1 else x.contiguous(), native=True, overlap=overlap)
        inner = moe_gemm(
            a,
            scale,
            prepared.w13,
            pairs,
            tile,
            x.dtype,
            pairs_per_row=top_k,
            activation=spec.activation,
            gated=spec.gated,
            pair_weight=None,
            overlap=overlap,
        )
        a, scale = quantize_tokens(inner, native=True, overlap=overlap)
        tile = choose_tile(expert_ids.numel(), spec.num_experts, gated=False)
        outer = moe_gemm(
            a,
            scale,
            prepared.w2,
            pairs,
            tile,
            x.dtype,
            pairs_per_row=1,
            activation=None,
            gated=False,
            pair_weight=expert_weights.contiguous(),
            overlap=overlap,
        )
        return sum_choices(outer, top_k, overlap=overlap)


def _flat(weight: MXTensor) -> MXTensor:
    """All experts' rows one after another."""
    return MXTensor(weight.data.flatten(0, 1), weight.scale.flatten(0, 1))


def _fold(weight: MXTensor) -> FoldedExperts:
    folded = fold_mxfp8(_flat(weight), native=True)
    return FoldedExperts(folded.data, torch.exp2(folded.row_scale.float() - SCALE_BIAS), weight.shape[0])
