"""The scan of Mamba2 on a GPU: instructions, how it is cut, and results against the recurrence in fp64."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from eightfold.kernels import jit, mamba2
from eightfold.kernels.mamba2 import ScanTile, choose_scan_tile
from eightfold.kernels.mamba2_step import choose_step_tile, has_single_tokens, scan_step
from eightfold.kernels.operations import MambaSpec
from tests.kernels.ahead_of_time import ptx
from tests.kernels.recurrences import (
    BF16_SCAN,
    FP32_SCAN,
    Exact,
    Problem,
    Save,
    check_scan,
    make_metadata,
    make_problem,
    make_spec,
    scan_exactly,
)
from tests.kernels.test_mamba2_step import SIZES, TYPES

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
NANO = make_spec(64, 64, 128, 8, dtype=torch.bfloat16)
MIXED = (1, 2, 17, 65, 1, 130)
MIXED_SAVES = ((2, 16), (3, 1), (3, 65), (4, 1), (5, 47), (5, 48), (5, 128))
LONG = (2048, 1, 700, 64, 1, 129, 1024)
LONG_SAVES = ((0, 16), (0, 1024), (0, 1040), (0, 2048), (1, 1), (2, 699), (6, 512))


def tile_of(num_tokens: int, max_query_len: int, spec: MambaSpec = NANO) -> ScanTile:
    """On an H200."""
    return choose_scan_tile(num_tokens, max_query_len, spec, num_processors=132, shared_operands=True)


def test_long_sequences_are_cut_where_that_fills_the_gpu() -> None:
    assert tile_of(16 * 2048, 2048).segment == 0
    assert tile_of(8192, 8192).segment == 2048
    assert tile_of(8192, 2048).segment == 0
    assert tile_of(8192, 7000).segment == 2048
    for num_tokens in (300, 2048, 8192, 100_000):
        tile = tile_of(num_tokens, num_tokens)
        assert tile.segment == 0 or (tile.segment % tile.block == 0 and 2 * tile.segment < num_tokens)


@pytest.mark.parametrize(
    ("lengths", "expected"), [((1,), True), ((5,), False), ((1, 1), True), ((1, 5), True), ((5, 5), False), ((5, 4, 5), False)]
)
def test_a_launch_for_single_tokens_is_made_where_there_may_be_some(lengths: tuple[int, ...], expected: bool) -> None:
    assert has_single_tokens(make_metadata(lengths), sum(lengths)) == expected


@needs_triton
@pytest.mark.parametrize(
    ("capability", "instruction"),
    [(90, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"), (100, "tcgen05.mma.cta_group::1.kind::f16")],
)
@pytest.mark.parametrize("name", ["scan_kernel", "segment_kernel", "scan_kernel of a segment"])
def test_products_are_those_of_the_tensor_cores(name: str, capability: int, instruction: str) -> None:
    kernel = mamba2.segment_kernel if name == "segment_kernel" else mamba2.scan_kernel
    tile = tile_of(2048, 2048)
    types = TYPES | {"state_ptr": "*fp32", "start_ptr": "*fp32", "decay_ptr": "*fp32"}
    constants = SIZES | {"block": tile.block, "block_p": tile.rows, "precision": "ieee", "stages": tile.num_stages}
    constants |= {"stride_x": 6144, "stride_dt": 10304, "stride_b": 6144, "overlap": True}
    if kernel is mamba2.scan_kernel:
        constants |= {"stride_c": 6144, "segmented": name.endswith("segment"), "but_single": True}
    text = ptx(kernel, capability, types, constants, num_warps=tile.num_warps)
    assert instruction in text
    assert "cp.async.cg.shared.global" in text


@needs_triton
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "tests.kernels.interpreted_mamba"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


def run_scan(problem: Problem, tile: ScanTile) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, state, metadata, spec = problem.scan_inputs, problem.ssm_state.clone(), problem.metadata, problem.spec
    y = torch.empty(inputs.x.shape, dtype=spec.activation_dtype, device=state.device)
    if has_single_tokens(metadata, len(y)):
        step_tile = choose_step_tile(len(metadata.slots), spec)
        scan_step(inputs, state, y, metadata, spec, step_tile, overlap=True)
    mamba2.scan(inputs, state, y, metadata, spec, tile, overlap=True)
    return y, state


@functools.cache
def case(
    sizes: tuple[int, int, int, int], lengths: tuple[int, ...], saves: tuple[Save, ...], state_dtype: torch.dtype
) -> tuple[Problem, Exact]:
    """A batch in bf16 and what it should give, which takes longer to find than the scan."""
    spec = make_spec(*sizes, dtype=torch.bfloat16, state_dtype=state_dtype)
    problem = make_problem(spec, make_metadata(lengths, saves, device="cuda"))
    return problem, scan_exactly(problem)


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize(
    ("tile", "state_dtype"),
    [
        (ScanTile(64, 64, 2, 4, 0), torch.float32),
        (ScanTile(64, 64, 2, 4, 256), torch.float32),
        (ScanTile(64, 32, 2, 8, 64), torch.float32),
        (ScanTile(128, 64, 1, 8, 256), torch.float32),
        (ScanTile(64, 64, 2, 4, 128), torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("lengths", "saves"), [(MIXED, MIXED_SAVES), (LONG, LONG_SAVES), ((2048,), ())], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64, 128, 8), (6, 20, 33, 2)], ids=str)
def test_a_scan_in_bf16(
    sizes: tuple[int, int, int, int],
    lengths: tuple[int, ...],
    saves: tuple[Save, ...],
    tile: ScanTile,
    state_dtype: torch.dtype,
) -> None:
    problem, exact = case(sizes, lengths, saves, state_dtype)
    check_scan(problem, *run_scan(problem, tile), BF16_SCAN, exact=exact)


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("segment", [0, 64])
@pytest.mark.parametrize("sizes", [(8, 64, 128, 2), (6, 20, 33, 2)], ids=str)
def test_a_scan_in_fp32(sizes: tuple[int, int, int, int], segment: int) -> None:
    problem = make_problem(make_spec(*sizes), make_metadata(MIXED, MIXED_SAVES, device="cuda"))
    tile = replace(tile_of(sum(MIXED), max(MIXED), problem.spec), segment=segment)
    check_scan(problem, *run_scan(problem, tile), FP32_SCAN)
