"""The GPU's kernels for decoding: instructions, cuts, and results against fp64 attention over the same keys and values."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from eightfold.kernels import jit, paged_attention
from eightfold.kernels.cuda_attention import describe
from eightfold.kernels.paged_attention import SHORTEST_PART, DecodeTile, choose_decode_tile, choose_parts, decode
from tests.kernels.ahead_of_time import ptx
from tests.kernels.attention_cases import (
    DTYPES,
    HOPPER_SHARED,
    LONG,
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
from tests.oracle import assert_matches, mismatch

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")


def check_decode(case: Case, tile: DecodeTile, parts: int, *, overlap: bool) -> Tensor:
    """Chunks of one token are right, and other rows are left alone."""
    out = unwritten(case)
    decode(*arguments(case, out), tile, parts, overlap=overlap)
    expected, magnitude = attend_exactly(case)
    rows = is_decode(case)
    assert_matches(out[rows], expected[rows], TOLERANCES[out.dtype], magnitude[rows])
    assert bool(out[~rows].isnan().all())
    return out


@pytest.mark.parametrize("shared_bytes", [SMALL_SHARED, HOPPER_SHARED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_tiles_fit(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> None:
    spec = spec_of(head_dim, dtype)
    tile = choose_decode_tile(spec, shared_bytes)
    row = max(16, 1 << (head_dim - 1).bit_length()) * dtype.itemsize
    assert 2 * tile.num_stages * tile.block_n * row <= shared_bytes


def test_a_context_is_cut_where_programs_are_few_and_it_is_long() -> None:
    spec = spec_of(128)
    assert choose_parts(1, spec, 100, 132) == 1
    assert choose_parts(1, spec, 4096, 132) == 4096 // SHORTEST_PART
    assert choose_parts(1, spec, 1 << 20, 132) == paged_attention.MOST_PARTS
    assert choose_parts(1, replace(spec, sliding_window=1000), 1 << 20, 132) == 8
    assert choose_parts(1024, spec, 1 << 20, 132) == 1
    assert [choose_parts(batch, spec, 4096, 132) for batch in (8, 16, 64)] == [17, 9, 3]


@needs_triton
@pytest.mark.parametrize(("capability", "shared_bytes"), [(80, SMALL_SHARED), (90, HOPPER_SHARED), (100, HOPPER_SHARED)])
def test_decoding_loads_ahead_and_multiplies_on_tensor_cores(capability: int, shared_bytes: int) -> None:
    tile = choose_decode_tile(spec_of(128), shared_bytes)
    constants = {
        "num_kv_heads": 8,
        "group": 4,
        "head_dim": 128,
        "width": 128,
        "block_size": 16,
        "window": 0,
        "shortest": SHORTEST_PART,
        "rows": 16,
        "block_n": tile.block_n,
        "whole": False,
        "overlap": capability >= 90,
    }
    kernel = paged_attention.decode_kernel
    text = ptx(kernel, capability, TYPES, constants, num_warps=tile.num_warps, num_stages=tile.num_stages)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text
    assert loads_ahead(text)


def loads_ahead(text: str) -> bool:
    """Whether a loop waits for keys and values while a later step's are still on their way."""
    return "cp.async.cg.shared.global" in text and any(
        int(left) >= 2 for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", text)
    )


@needs_triton
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.kernels.interpreted_attention"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_the_oracle_fails_planted_faults() -> None:
    case = make_case([(5, 80), (1, 40)], 4, 2, 64)
    expected, magnitude = attend_exactly(case)
    unequal = case.key_cache.clone()
    unequal[case.metadata.block_tables[0, 2], 5, 1] *= 1.5
    faults = {
        "a window": replace(case, spec=replace(case.spec, sliding_window=79)),
        "heads grouped in turn": replace(case, query=case.query[:, [0, 2, 1, 3]]),
        "keys for values": replace(case, key_cache=case.value_cache, value_cache=case.key_cache),
        "one key longer": replace(case, key_cache=unequal),
        "another scale": replace(case, spec=replace(case.spec, scale=case.spec.scale * 1.02)),
    }
    for dtype, tolerance in TOLERANCES.items():
        differs = partial(mismatch, expected=expected, tolerance=tolerance, magnitude=magnitude)
        assert differs(expected.to(dtype)) is None
        found = {name: differs(attend_exactly(fault)[0].to(dtype)) for name, fault in faults.items()}
        assert [name for name, reason in found.items() if reason is None] == []


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size", "window"), SHAPES)
def test_decoding(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    for chunks in (LONG, MIXED):
        case = make_case(
            chunks, num_heads, num_kv_heads, head_dim, dtype=dtype, block_size=block_size, window=window, device="cuda"
        )
        tile = choose_decode_tile(case.spec, describe(case.query.device).shared_bytes)
        for parts in (1, 2, 3, 8, 31, 128):
            check_decode(case, tile, parts, overlap=describe(case.query.device).overlap)


@pytest.mark.gpu
@gpu_test
def test_the_same_batch_gives_the_same_bits() -> None:
    chunks = [(1, 2500 - 77 * index) for index in range(32)] + [(17, 4000)]
    case = make_case(chunks, 32, 8, 128, dtype=torch.bfloat16, device="cuda")
    device, rows = describe(case.query.device), is_decode(case)
    tile = choose_decode_tile(case.spec, device.shared_bytes)
    first = check_decode(case, tile, 4, overlap=device.overlap)
    for _ in range(10):
        out = unwritten(case)
        decode(*arguments(case, out), tile, 4, overlap=device.overlap)
        assert torch.equal(out[rows], first[rows])


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("window", [None, 200])
def test_a_graph_stays_valid_as_contexts_grow(window: int | None) -> None:
    case = make_case([(1, 2000), (1, 1500), (1, 9)], 32, 8, 128, dtype=torch.bfloat16, window=window, device="cuda")
    tile, lengths = choose_decode_tile(case.spec, HOPPER_SHARED), case.metadata.context_lens
    final = lengths.clone()
    lengths.fill_(1)
    out = unwritten(case)
    decode(*arguments(case, out), tile, 16, overlap=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(*arguments(case, out), tile, 16, overlap=True)
    for step in range(0, 2000, 333):
        lengths.copy_((final - step).clamp(min=1))
        out.fill_(torch.nan)
        graph.replay()
        expected, magnitude = attend_exactly(case)
        assert_matches(out, expected, TOLERANCES[out.dtype], magnitude)
