"""The GPU's backend for Mamba2: what it declines, and what it promises beyond the right values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.cuda_mamba import CudaMamba
from eightfold.kernels.registry import Hardware
from tests.kernels.recurrences import (
    BF16_SCAN,
    Problem,
    Save,
    assert_same_bits,
    check_conv,
    check_scan,
    make_metadata,
    make_problem,
    make_spec,
)
from tests.tolerances import BF16

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
MAMBA = CudaMamba()
NANO = make_spec(64, 64, 128, 8, dtype=torch.bfloat16)
PREFILL = (2048, 300, 1, 1777, 64, 2, 17)
SAVES = ((0, 1024), (1, 288), (2, 1), (3, 16), (3, 1776))
BATCHES: list[tuple[tuple[int, ...], tuple[Save, ...]]] = [
    ((1,), ()),
    ((1,) * 64, ((3, 1), (60, 1))),
    (PREFILL, SAVES),
    ((2048,), ()),
]


def hardware(*capability: int) -> Hardware:
    return Hardware(torch.device("cuda"), "a GPU", (capability[0], capability[1]), frozenset(), 1 << 34, 8)


@needs_triton
def test_what_it_takes_and_what_it_declines() -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert MAMBA.declines(NANO, hardware(*capability)) is None
    assert "this GPU has 7.5" in str(MAMBA.declines(NANO, hardware(7, 5)))
    cpu = Hardware(torch.device("cpu"), "a CPU", None, frozenset(), 1 << 34, 8)
    assert MAMBA.declines(NANO, cpu) == "needs a CUDA GPU"
    assert "512 elements a row" in str(MAMBA.declines(make_spec(8, 64, 512, 1), hardware(9, 0)))
    assert "float64" in str(MAMBA.declines(make_spec(dtype=torch.float64), hardware(9, 0)))


def run(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs and states of both operations."""
    conv_state, ssm_state = problem.conv_state.clone(), problem.ssm_state.clone()
    inputs, metadata, spec = problem.scan_inputs, problem.metadata, problem.spec
    convolved = MAMBA.conv(problem.conv_inputs, problem.weight, problem.bias, conv_state, metadata, spec)
    operands = (inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, inputs.d, inputs.dt_bias)
    return convolved, conv_state, MAMBA.scan(*operands, ssm_state, metadata, spec), ssm_state


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize(("lengths", "saves"), BATCHES, ids=[f"{len(lengths)} of {max(lengths)}" for lengths, _ in BATCHES])
def test_a_layer_of_nemotron_nano(lengths: tuple[int, ...], saves: tuple[Save, ...]) -> None:
    problem = make_problem(NANO, make_metadata(lengths, saves, device="cuda"))
    convolved, conv_state, y, ssm_state = run(problem)
    check_conv(problem, convolved, conv_state, BF16)
    check_scan(problem, y, ssm_state, BF16_SCAN)


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize(("lengths", "saves"), BATCHES, ids=[f"{len(lengths)} of {max(lengths)}" for lengths, _ in BATCHES])
def test_the_same_batch_gives_the_same_bits(lengths: tuple[int, ...], saves: tuple[Save, ...]) -> None:
    problem = make_problem(NANO, make_metadata(lengths, saves, device="cuda"))
    first = run(problem)
    for _ in range(10):
        for found, expected in zip(run(problem), first, strict=True):
            assert_same_bits(found, expected)


@pytest.mark.gpu
@gpu_test
def test_a_sequence_in_parts_goes_on_where_it_was() -> None:
    whole = make_problem(NANO, make_metadata((1100,), is_new=(True,), device="cuda"))
    conv_state, ssm_state, start, rows = whole.conv_state.clone(), whole.ssm_state.clone(), 0, []
    inputs = whole.scan_inputs
    for length in (512, 1, 64, 523):
        metadata = make_metadata((length,), is_new=(start == 0,), device="cuda")
        part = slice(start, start + length)
        MAMBA.conv(whole.conv_inputs[part], whole.weight, whole.bias, conv_state, metadata, NANO)
        tokens = (inputs.x[part], inputs.dt[part], inputs.a, inputs.b[part], inputs.c[part], inputs.d, inputs.dt_bias)
        rows.append(MAMBA.scan(*tokens, ssm_state, metadata, NANO))
        start += length
    check_scan(whole, torch.cat(rows), ssm_state, BF16_SCAN)
    assert_same_bits(conv_state, run(whole)[1])


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize(("lengths", "saves"), BATCHES[:2], ids=["1", "64"])
def test_a_graph_of_steps_equals_one_at_a_time(lengths: tuple[int, ...], saves: tuple[Save, ...]) -> None:
    """Steps that feed each other through the states: a launch that read too early would differ."""
    problem = make_problem(NANO, make_metadata(lengths, saves, is_new=(False,) * len(lengths), device="cuda"))
    conv_state, ssm_state, inputs = problem.conv_state.clone(), problem.ssm_state.clone(), problem.scan_inputs

    def steps(*, one_at_a_time: bool) -> Tensor:
        total = torch.zeros(inputs.x.shape, device="cuda")
        for _ in range(8):
            MAMBA.conv(problem.conv_inputs, problem.weight, problem.bias, conv_state, problem.metadata, NANO)
            operands = (inputs.x, inputs.dt, inputs.a, inputs.b, inputs.c, inputs.d, inputs.dt_bias)
            total += MAMBA.scan(*operands, ssm_state, problem.metadata, NANO)
            if one_at_a_time:
                torch.cuda.synchronize()
        return total

    expected, expected_states = steps(one_at_a_time=True), (conv_state.clone(), ssm_state.clone())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = steps(one_at_a_time=False)
    for _ in range(3):
        conv_state.copy_(problem.conv_state)
        ssm_state.copy_(problem.ssm_state)
        found.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
        assert_same_bits(conv_state, expected_states[0])
        assert_same_bits(ssm_state, expected_states[1])


@pytest.mark.gpu
@gpu_test
def test_no_tokens_at_all() -> None:
    problem = make_problem(NANO, make_metadata((4,), device="cuda"))
    inputs = problem.scan_inputs
    operands = (inputs.x[:0], inputs.dt[:0], inputs.a, inputs.b[:0], inputs.c[:0], inputs.d, inputs.dt_bias)
    assert MAMBA.scan(*operands, problem.ssm_state, problem.metadata, NANO).shape == (0, 64, 64)
