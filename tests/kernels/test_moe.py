"""The GPU's kernels for experts: instructions, sorting, and results against fp64 products of the same operands."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from eightfold.kernels import jit, moe
from eightfold.kernels.moe import FoldedExperts, MoeTile, choose_tile, moe_gemm, sort_pairs, sum_choices
from eightfold.kernels.operations import Activation
from eightfold.kernels.quantize import quantize_tokens
from eightfold.quant import mxfp8
from tests.kernels.ahead_of_time import ptx
from tests.oracle import assert_matches
from tests.tolerances import BF16, FP8_TENSOR_CORE

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
TILES = [choose_tile(pairs, 8, gated=gated) for pairs in (8, 160, 480, 4000) for gated in (False, True)]


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_grow_with_the_pairs_of_an_expert_and_fit(gated: bool) -> None:
    tiles = [choose_tile(128 * each, 128, gated=gated) for each in (1, 20, 50, 400)]
    assert [tile.block_m for tile in tiles] == [16, 32, 64, 128]
    for tile in tiles:
        rows = tile.block_m + tile.block_n * (2 if gated else 1)
        assert tile.num_stages * tile.block_k * rows < 225 << 10


@needs_triton
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("capability", [89, 90])
def test_experts_multiply_fp8(capability: int, gated: bool) -> None:
    tile = choose_tile(6, 128, gated=gated)
    types = dict.fromkeys(("a_scale_ptr", "row_scale_ptr", "pair_weight_ptr"), "*fp32") | {
        "a_ptr": "*fp8e4nv",
        "y_ptr": "*bf16",
    }
    types |= dict.fromkeys(("places_ptr", "block_expert_ptr", "num_blocks_ptr"), "*i32")
    types["w_desc"] = f"tensordesc<fp8e4nv[{tile.block_n},{tile.block_k}]>"
    constants = {
        "pairs_per_row": 6,
        "activation": "silu" if gated else "relu2",
        "gated": gated,
        "weighted": False,
        "block_n": tile.block_n,
        "block_m": tile.block_m,
        "block_k": tile.block_k,
        "overlap": capability >= 90,
    }
    text = ptx(moe.moe_gemm_kernel, capability, types, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
    if capability == 90:
        assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in text
        assert "cp.async.bulk.tensor.2d" in text
    else:
        assert "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3" in text


@needs_triton
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.kernels.interpreted_moe"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


def choices(num_tokens: int, num_experts: int, top_k: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])


def check_sorted(expert_ids: Tensor, num_experts: int, block_m: int, *, overlap: bool) -> None:
    """Every pair stands once, in a block of its expert, and no expert has more blocks than it needs."""
    pairs = sort_pairs(expert_ids, num_experts, block_m, overlap=overlap)
    flat = expert_ids.flatten().tolist()
    num_blocks = int(pairs.num_blocks)
    counts = [flat.count(expert) for expert in range(num_experts)]
    assert num_blocks == sum(-(-count // block_m) for count in counts)
    seen = []
    for block, expert in enumerate(pairs.block_expert[:num_blocks].tolist()):
        inside = pairs.places[block * block_m : (block + 1) * block_m].tolist()
        real = [pair for pair in inside if pair != len(flat)]
        assert real
        assert all(flat[pair] == expert for pair in real)
        assert inside[: len(real)] == real
        seen += real
    assert sorted(seen) == list(range(len(flat)))


def experts(num_experts: int, rows: int, k: int, *, seed: int = 0) -> tuple[FoldedExperts, Tensor]:
    """A folded projection, and its values in fp64 `[E, R, K']`."""
    mx = mxfp8.quantize(torch.randn(num_experts * rows, k, generator=torch.Generator().manual_seed(seed)))
    folded = mxfp8.fold(mx)
    data = torch.nn.functional.pad(folded.data.view(torch.uint8), (0, -k % 16)).view(torch.float8_e4m3fn)
    scale = torch.exp2(folded.row_scale.float() - 127)
    values = (data.double() * scale.double()[:, None]).unflatten(0, (num_experts, rows))
    return FoldedExperts(data, scale, num_experts), values


def expected_pairs(
    a: Tensor, scale: Tensor, values: Tensor, ids: Tensor, activation: Activation | None, *, gated: bool, per_row: int
) -> tuple[Tensor, Tensor]:
    """What `moe_gemm` should give in fp64, and a bound on the sums of magnitudes behind it."""
    rows = (a.double() * scale.double()[:, None]).repeat_interleave(per_row, dim=0)
    weights = values[ids.flatten()]  # [P, R, K']
    found = torch.einsum("pk,prk->pr", rows, weights)
    magnitude = torch.einsum("pk,prk->pr", rows.abs(), weights.abs())
    up, up_magnitude = torch.ones_like(found), torch.ones_like(found)
    if gated:
        (found, up), (magnitude, up_magnitude) = found.chunk(2, dim=1), magnitude.chunk(2, dim=1)
    if activation == "silu":
        found = torch.nn.functional.silu(found)
    if activation == "relu2":
        found, magnitude = found.relu().square(), magnitude.square()
    return found * up, magnitude * up_magnitude


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 128, 6), (7, 5, 2), (129, 128, 6), (1000, 8, 3), (3000, 60, 4)]
)
def test_sorting(num_tokens: int, num_experts: int, top_k: int, block_m: int) -> None:
    check_sorted(choices(num_tokens, num_experts, top_k).cuda(), num_experts, block_m, overlap=True)


@pytest.mark.gpu
@gpu_test
def test_sorting_when_all_choose_the_same_expert() -> None:
    check_sorted(torch.full((300, 1), 3).cuda(), 64, 16, overlap=True)


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("activation", "gated"), [("silu", True), ("relu2", False), (None, False)], ids=["silu", "relu2", "plain"]
)
@pytest.mark.parametrize(("num_tokens", "rows", "k"), [(1, 32, 32), (7, 70, 300), (129, 58, 576)])
def test_products(num_tokens: int, rows: int, k: int, activation: Activation | None, gated: bool, tile: MoeTile) -> None:
    weight, values = experts(8, 2 * rows if gated else rows, k)
    ids = choices(num_tokens, 8, 3).cuda()
    pairs = sort_pairs(ids, 8, tile.block_m, overlap=True)
    weight = FoldedExperts(weight.data.cuda(), weight.row_scale.cuda(), 8)
    x = torch.randn(num_tokens, k, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    a, scale = quantize_tokens(x, native=True, overlap=True)
    found = moe_gemm(
        a,
        scale,
        weight,
        pairs,
        tile,
        torch.float32,
        pairs_per_row=3,
        activation=activation,
        gated=gated,
        pair_weight=None,
        overlap=True,
    )
    expected, magnitude = expected_pairs(a, scale, values.cuda(), ids, activation, gated=gated, per_row=3)
    assert_matches(found, expected, FP8_TENSOR_CORE, magnitude)


@pytest.mark.gpu
@gpu_test
def test_products_by_pair_are_weighed() -> None:
    weight, values = experts(8, 40, 64)
    ids, tile = choices(9, 8, 2).cuda(), choose_tile(18, 8, gated=False)
    pairs = sort_pairs(ids, 8, tile.block_m, overlap=True)
    weight = FoldedExperts(weight.data.cuda(), weight.row_scale.cuda(), 8)
    x, factor = torch.randn(18, 64).bfloat16().cuda(), torch.rand(9, 2).cuda()
    a, scale = quantize_tokens(x, native=True, overlap=True)
    found = moe_gemm(
        a,
        scale,
        weight,
        pairs,
        tile,
        torch.float32,
        pairs_per_row=1,
        activation=None,
        gated=False,
        pair_weight=factor,
        overlap=True,
    )
    expected, magnitude = expected_pairs(a, scale, values.cuda(), ids, None, gated=False, per_row=1)
    factor = factor.double().flatten()[:, None]
    assert_matches(found, expected * factor, FP8_TENSOR_CORE, magnitude * factor)


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("k", [1, 300, 2688])
def test_the_sum_over_choices(k: int) -> None:
    z = torch.randn(7 * 6, k).bfloat16().cuda()
    expected = z.double().view(7, 6, k).sum(dim=1)
    assert_matches(sum_choices(z, 6, overlap=True), expected, BF16, z.double().abs().view(7, 6, k).sum(dim=1))
