"""Experts through the native product against the reference, which takes one expert after another in fp32."""

from __future__ import annotations

import pytest
import torch

from eightfold.errors import InputError
from eightfold.kernels.cpu_moe import CpuMoe
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import MoeSpec
from eightfold.kernels.reference_mixers import ReferenceMoe
from eightfold.quant.mxfp8 import quantize

EXPERTS, TOP_K = 5, 2


def spec(*, gated: bool, dtype: torch.dtype = torch.float32, weight_format: str = "mxfp8") -> MoeSpec:
    return MoeSpec("experts", EXPERTS, TOP_K, 40, 58, gated, "silu" if gated else "relu2", weight_format, dtype)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choices(num_tokens: int, among: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    scores = randn(num_tokens, among, seed=7).softmax(dim=-1).topk(TOP_K)
    return scores.indices, scores.values


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_the_references(gated: bool, num_tokens: int, dtype: torch.dtype) -> None:
    asked = spec(gated=gated, dtype=dtype)
    w13, w2 = quantize(randn(EXPERTS, 58 * (1 + gated), 40, seed=1)), quantize(randn(EXPERTS, 40, 58, seed=2))
    x, (ids, weights) = randn(num_tokens, 40, seed=3).to(dtype), choices(num_tokens)
    ours, oracle = CpuMoe(), ReferenceMoe()
    found = ours.run(x, ids, weights, ours.prepare(w13, w2, asked))
    expected = oracle.run(x, ids, weights, oracle.prepare(w13, w2, asked))
    assert found.dtype == dtype
    assert found.shape == x.shape
    bound = 1e-5 if dtype == torch.float32 else 2**-6  # bf16 rounds between the two products, too
    assert torch.all((found - expected).abs() <= bound * expected.abs().max(dim=-1, keepdim=True).values)


def test_an_expert_that_nobody_chose_is_not_read() -> None:
    w13, w2 = randn(EXPERTS, 58, 40, seed=1), randn(EXPERTS, 40, 58, seed=2)
    x, (ids, weights) = randn(9, 40, seed=3), choices(9, among=EXPERTS - 1)
    asked, ours = spec(gated=False, weight_format="float32"), CpuMoe()
    expected = ours.run(x, ids, weights, ours.prepare(w13, w2, asked))
    poisoned = w13.clone()
    poisoned[-1] = torch.nan
    assert torch.equal(ours.run(x, ids, weights, ours.prepare(poisoned, w2, asked)), expected)
    w2[-1] = torch.nan
    assert torch.equal(ours.run(x, ids, weights, ours.prepare(w13, w2, asked)), expected)


def test_each_tokens_answer_is_its_own() -> None:
    w13, w2 = quantize(randn(EXPERTS, 58, 40, seed=1)), quantize(randn(EXPERTS, 40, 58, seed=2))
    x, (ids, weights), ours = randn(17, 40, seed=3), choices(17), CpuMoe()
    prepared = ours.prepare(w13, w2, spec(gated=False))
    together = ours.run(x, ids, weights, prepared)
    alone = torch.cat([ours.run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], prepared) for t in range(17)])
    assert torch.all((together - alone).abs() <= 1e-5 * alone.abs().max(dim=-1, keepdim=True).values)


def test_a_nan_in_any_expert_is_refused_when_it_is_prepared() -> None:
    w13, w2 = quantize(randn(EXPERTS, 58, 40, seed=1)), quantize(randn(EXPERTS, 40, 58, seed=2))
    w2.scale[3, 0, 0] = 255
    with pytest.raises(InputError, match=r"MXFP8 weight \[40, 58\]: got NaN"):
        CpuMoe().prepare(w13, w2, spec(gated=False))


def test_what_it_declines() -> None:
    assert CpuMoe().declines(spec(gated=True), detect("cpu")) is None
    assert CpuMoe().declines(spec(gated=True, dtype=torch.float16), detect("cpu")) is not None
    assert CpuMoe().declines(spec(gated=True, weight_format="fp8"), detect("cpu")) == "fp8 weights"
