"""The GPU's kernel for prefill: instructions, tiles, and results against fp64 attention over the same keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eightfold.kernels import jit, paged_prefill
from eightfold.kernels.cuda_attention import describe
from eightfold.kernels.paged_prefill import PrefillTile, choose_prefill_tile, prefill
from tests.kernels.ahead_of_time import ptx
from tests.kernels.attention_cases import (
    DTYPES,
    HOPPER_SHARED,
    MIXED,
    SHAPES,
    SMALL_SHARED,
    TOLERANCES,
    TYPES,
    Case,
    arguments,
    attend_exactly,
    is_decode,
    make_case,
    spec_of,
    unwritten,
)
from tests.oracle import assert_matches

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")


def check_prefill(case: Case, tile: PrefillTile, *, overlap: bool) -> Tensor:
    """Longer chunks are right, and other rows are left alone."""
    out = unwritten(case)
    prefill(*arguments(case, out), tile, overlap=overlap)
    expected, magnitude = attend_exactly(case)
    rows = ~is_decode(case)
    assert_matches(out[rows], expected[rows], TOLERANCES[out.dtype], magnitude[rows])
    assert bool(out[~rows].isnan().all())
    return out


@pytest.mark.parametrize("shared_bytes", [SMALL_SHARED, HOPPER_SHARED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_tiles_fit_and_are_no_taller_than_the_longest_chunk(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> None:
    row = max(16, 1 << (head_dim - 1).bit_length()) * dtype.itemsize
    for group in (1, 7, 32):
        for length in (2, 9, 4000):
            tile = choose_prefill_tile(spec_of(head_dim, dtype, group), length, shared_bytes)
            assert group <= tile.block_m <= min(128, max(32, 2 * group * length))
            assert (tile.block_m + 2 * tile.num_stages * tile.block_n) * row < shared_bytes


@needs_triton
@pytest.mark.parametrize("window", [0, 1024])
@pytest.mark.parametrize(
    ("capability", "shared_bytes", "instruction"),
    [
        (80, SMALL_SHARED, "mma.sync.aligned.m16n8k16"),
        (90, HOPPER_SHARED, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16"),
        (100, HOPPER_SHARED, "tcgen05.mma"),
    ],
)
def test_prefill_loads_ahead_and_multiplies_on_tensor_cores(
    capability: int, shared_bytes: int, instruction: str, window: int
) -> None:
    tile = choose_prefill_tile(spec_of(128), 2048, shared_bytes)
    constants = {
        "num_kv_heads": 8,
        "group": 4,
        "head_dim": 128,
        "width": 128,
        "block_size": 16,
        "window": window,
        "seqs": 16,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "overlap": capability >= 90,
    }
    kernel = paged_prefill.prefill_kernel
    text = ptx(kernel, capability, TYPES, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
    assert instruction in text
    assert "cp.async.cg.shared.global" in text


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "window"), SHAPES)
def test_prefill(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    for chunks in (MIXED, [(2, 2)], [(7, 7), (700, 700)], [(1, 5), (128, 128), (127, 400)]):
        case = make_case(
            chunks, num_heads, num_kv_heads, head_dim, dtype=dtype, block_size=block_size, window=window, device="cuda"
        )
        device = describe(case.query.device)
        for length in (2, 8, 4096):
            check_prefill(case, choose_prefill_tile(case.spec, length, device.shared_bytes), overlap=device.overlap)


@pytest.mark.gpu
@gpu_test
def test_the_same_batch_gives_the_same_bits() -> None:
    case = make_case([(1, 100), (2000, 2048), (300, 301), (17, 4000)], 32, 8, 128, dtype=torch.bfloat16, device="cuda")
    device, rows = describe(case.query.device), ~is_decode(case)
    tile = choose_prefill_tile(case.spec, 2000, device.shared_bytes)
    first = check_prefill(case, tile, overlap=device.overlap)
    for _ in range(10):
        out = unwritten(case)
        prefill(*arguments(case, out), tile, overlap=device.overlap)
        assert torch.equal(out[rows], first[rows])
