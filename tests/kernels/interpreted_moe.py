"""What Triton's interpreter can check of the kernels for experts; see `interpreted.py`."""

from __future__ import annotations

import os

import torch

from eightfold.kernels.moe import MoeTile, moe_gemm, sort_pairs, sum_choices
from eightfold.kernels.operations import Activation
from eightfold.kernels.quantize import quantize_tokens
from tests.kernels.test_moe import check_sorted, choices, expected_pairs, experts
from tests.oracle import assert_matches
from tests.tolerances import FP32


def check_products() -> None:
    cases: list[tuple[Activation | None, bool]] = [("silu", True), ("relu2", False), (None, False)]
    for activation, gated in cases:
        weight, values = experts(4, 2 * 33 if gated else 33, 40)
        ids, tile = choices(5, 4, 2), MoeTile(16, 64, 64, 2, 4)
        pairs = sort_pairs(ids, 4, tile.block_m, overlap=False)
        a, scale = quantize_tokens(torch.randn(5, 40), native=False, overlap=False)
        factor = torch.rand(5, 2)
        found = moe_gemm(
            a,
            scale,
            weight,
            pairs,
            tile,
            torch.float32,
            pairs_per_row=2,
            activation=activation,
            gated=gated,
            pair_weight=factor,
            overlap=False,
        )
        expected, magnitude = expected_pairs(a, scale, values, ids, activation, gated=gated, per_row=2)
        weights = factor.double().flatten()[:, None]
        assert_matches(found, expected * weights, FP32, magnitude * weights)
        summed = sum_choices(found, 2, overlap=False)
        assert_matches(summed, found.double().view(5, 2, -1).sum(dim=1), FP32, found.double().abs().view(5, 2, -1).sum(dim=1))


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    for num_tokens, num_experts, top_k, block_m in ((1, 6, 2, 16), (40, 5, 2, 16), (9, 3, 3, 4)):
        check_sorted(choices(num_tokens, num_experts, top_k), num_experts, block_m, overlap=False)
    check_products()
