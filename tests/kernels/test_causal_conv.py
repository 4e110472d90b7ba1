"""The GPU's convolution: instructions, and results against fp64; the interpreter's part is in `interpreted_mamba.py`."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels import causal_conv, jit
from eightfold.kernels.causal_conv import ConvTile
from tests.kernels.ahead_of_time import ptx
from tests.kernels.recurrences import Save, check_conv, make_metadata, make_problem, make_spec
from tests.tolerances import OF_DTYPE

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
TYPES = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "state_ptr", "y_ptr"), "*bf16") | {
    "slots_ptr": "*i64",
    "is_new_ptr": "*i1",
    "query_start_ptr": "*i32",
    "save_sequences_ptr": "*i64",
    "save_lengths_ptr": "*i64",
    "save_slots_ptr": "*i64",
}


@needs_triton
@pytest.mark.parametrize("capability", [90, 100])
def test_inputs_are_read_sixteen_bytes_at_a_time(capability: int) -> None:
    constants = {"taps": 4, "has_bias": True, "columns": 4, "overlap": True}
    sizes = {"num_channels": 6144, "stride_x": 10304, "block_t": 64, "block_c": 128}
    text = ptx(causal_conv.conv_kernel, capability, TYPES, constants | sizes, num_warps=8)
    assert "ld.global.v4.b32" in text
    assert "st.global.v4.b32" in text
    sizes = {"has_saves": True, "block_c": 256}
    text = ptx(causal_conv.conv_step_kernel, capability, TYPES, constants | sizes, num_warps=4)
    assert "griddepcontrol.wait" in text


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tile", [causal_conv.PREFILL_TILE, ConvTile(16, 64, 2)], ids=str)
@pytest.mark.parametrize(
    ("lengths", "saves"),
    [
        ((1, 2, 17, 65, 1, 130), ((2, 16), (3, 1), (3, 65), (4, 1), (5, 47), (5, 48), (5, 128))),
        ((2048, 1, 700, 64), ((0, 1024), (0, 2048), (2, 1))),
        ((3, 1, 1), ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(64, 64, 128, 8), (3, 5, 7, 1)], ids=str)
def test_prompts(
    sizes: tuple[int, int, int, int], lengths: tuple[int, ...], saves: tuple[Save, ...], tile: ConvTile, dtype: torch.dtype
) -> None:
    problem = make_problem(make_spec(*sizes, dtype=dtype), make_metadata(lengths, saves, device="cuda"))
    state = problem.conv_state.clone()
    inputs = (problem.conv_inputs, problem.weight, problem.bias, state, problem.metadata)
    found = causal_conv.causal_conv(*inputs, overlap=True, tile=tile)
    check_conv(problem, found, state, OF_DTYPE[dtype])


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("num_seqs", [1, 7, 64])
def test_decoding(num_seqs: int, kernel: int) -> None:
    saves = ((num_seqs // 2, 1),)
    spec = make_spec(64, 64, 128, 8, conv_kernel=kernel, dtype=torch.bfloat16)
    problem = make_problem(spec, make_metadata((1,) * num_seqs, saves, device="cuda"))
    state = problem.conv_state.clone()
    inputs = (problem.conv_inputs, problem.weight, problem.bias, state, problem.metadata)
    check_conv(problem, causal_conv.causal_conv(*inputs, overlap=True), state, OF_DTYPE[torch.bfloat16])
