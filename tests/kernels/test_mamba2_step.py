"""One token of each sequence on a GPU: instructions, and results against fp64; the rest is in `interpreted_mamba.py`."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels import jit, mamba2_step
from eightfold.kernels.mamba2_step import StepTile, choose_step_tile
from tests.kernels.ahead_of_time import ptx
from tests.kernels.recurrences import Save, check_scan, make_metadata, make_problem, make_spec
from tests.tolerances import BF16, FP32, OF_DTYPE, Tolerance

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
TYPES = dict.fromkeys(("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "y_ptr"), "*bf16") | {
    "a_ptr": "*fp32",
    "d_ptr": "*fp32",
    "dt_bias_ptr": "*fp32",
    "slots_ptr": "*i64",
    "is_new_ptr": "*i1",
    "query_start_ptr": "*i32",
    "save_sequences_ptr": "*i64",
    "save_lengths_ptr": "*i64",
    "save_slots_ptr": "*i64",
    "low": "fp32",
    "high": "fp32",
}
SIZES = {"num_heads": 64, "head_dim": 64, "state_size": 128, "heads_per_group": 8, "block_n": 128}


def test_few_sequences_are_spread_over_more_programs() -> None:
    spec = make_spec(64, 64, 128, 8)
    assert choose_step_tile(1, spec).rows < choose_step_tile(64, spec).rows == 64
    assert choose_step_tile(1, make_spec(2, 5, 16, 1)).rows == 16


@needs_triton
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("capability", [90, 100])
def test_states_move_sixteen_bytes_at_a_time(capability: int, state: str) -> None:
    tile = choose_step_tile(64, make_spec(64, 64, 128, 8))
    constants = SIZES | {"all_single": True, "has_saves": True, "block_p": tile.rows, "overlap": True}
    text = ptx(mamba2_step.scan_step_kernel, capability, TYPES | {"state_ptr": f"*{state}"}, constants, num_warps=4)
    moves = 64 * 128 * (4 if state == "fp32" else 2) // 16 // (32 * tile.num_warps)
    assert text.count("ld.global.v4.b32") >= moves
    assert text.count("st.global.v4.b32") >= 2 * moves
    assert ".local" not in text


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "state_tolerance"),
    [(torch.bfloat16, torch.float32, FP32), (torch.bfloat16, torch.bfloat16, BF16), (torch.float32, torch.float32, FP32)],
    ids=str,
)
@pytest.mark.parametrize("tile", [None, StepTile(32, 2)], ids=str)
@pytest.mark.parametrize(("num_seqs", "saves"), [(1, ()), (7, ((0, 1), (5, 1))), (64, ((63, 1),))], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64, 128, 8), (6, 20, 33, 2)], ids=str)
def test_a_step(
    sizes: tuple[int, int, int, int],
    num_seqs: int,
    saves: tuple[Save, ...],
    tile: StepTile | None,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    state_tolerance: Tolerance,
) -> None:
    spec = make_spec(*sizes, dtype=dtype, state_dtype=state_dtype)
    problem = make_problem(spec, make_metadata((1,) * num_seqs, saves, device="cuda"))
    state, inputs = problem.ssm_state.clone(), problem.scan_inputs
    y = torch.empty(inputs.x.shape, dtype=dtype, device="cuda")
    tile = tile or choose_step_tile(num_seqs, spec)
    mamba2_step.scan_step(inputs, state, y, problem.metadata, spec, tile, overlap=True)
    check_scan(problem, y, state, OF_DTYPE[dtype], state_tolerance)
