"""What Triton's interpreter can check of the kernels for Mamba2; see `interpreted.py`. It cuts bf16 off where a GPU rounds."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import torch

from eightfold.kernels.causal_conv import ConvTile, causal_conv
from eightfold.kernels.mamba2 import ScanTile, scan
from eightfold.kernels.mamba2_step import StepTile, has_single_tokens, scan_step
from eightfold.kernels.operations import MambaSpec
from tests.conftest import poison
from tests.kernels.recurrences import (
    FP32_SCAN,
    Problem,
    assert_same_bits,
    check_conv,
    check_scan,
    make_metadata,
    make_problem,
    make_spec,
    scan_exactly,
)
from tests.oracle import assert_matches
from tests.tolerances import FP32, Tolerance

CUT_BF16 = Tolerance("bf16 result, cut off", 8e-3, 2e-5, 2**-7, "cutting changes a number by up to 2^-7 of itself")
MIXED = (1, 2, 17, 65, 1, 130)
MIXED_SAVES = ((2, 16), (3, 1), (3, 65), (4, 1), (5, 47), (5, 48), (5, 128))


def run_scan(problem: Problem, tile: ScanTile) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, state = problem.scan_inputs, problem.ssm_state.clone()
    y = poison(torch.empty(inputs.x.shape))
    metadata, spec = problem.metadata, problem.spec
    if has_single_tokens(metadata, len(y)):
        scan_step(inputs, state, y, metadata, spec, StepTile(16, 4), overlap=False)
    if metadata.max_query_len > 1:
        scan(inputs, state, y, metadata, spec, tile, overlap=False)
    return y, state


def check_convolutions() -> None:
    for taps, lengths, saves in (
        (4, MIXED, MIXED_SAVES),
        (2, (1, 2, 17), ((1, 1), (1, 2), (2, 16))),
        (4, (3, 1, 1), ()),
        (4, (1, 1, 1, 1), ((1, 1), (2, 1))),
        (1, (1, 4), ()),
    ):
        problem = make_problem(make_spec(3, 5, 7, 1, conv_kernel=taps), make_metadata(lengths, saves))
        for bias in (problem.bias, None):
            state = problem.conv_state.clone()
            exact = problem if bias is not None else without_bias(problem)
            tile = None if max(lengths) == 1 else ConvTile(16, 32, 4)
            found = causal_conv(problem.conv_inputs, problem.weight, bias, state, problem.metadata, overlap=False, tile=tile)
            check_conv(exact, found, state, FP32)


def without_bias(problem: Problem) -> Problem:
    fresh = problem.fresh()
    fresh.bias.zero_()
    return fresh


def check_steps() -> None:
    for spec, saves in (
        (make_spec(4, 20, 33, 4), ()),
        (make_spec(4, 20, 33, 1), ((1, 1), (3, 1))),
        (make_spec(6, 5, 16, 2, dt_limits=(0.05, 1.5)), ((2, 1),)),
    ):
        problem = make_problem(spec, make_metadata((1, 1, 1, 1), saves))
        found, state = run_scan(problem, ScanTile(16, 16, 1, 4, 0))
        check_scan(problem, found, state, FP32)


def check_scans() -> None:
    cases: tuple[tuple[MambaSpec, ScanTile], ...] = (
        (make_spec(2, 20, 33, 1), ScanTile(16, 32, 1, 4, 0)),
        (make_spec(4, 20, 33, 4), ScanTile(32, 16, 1, 4, 32)),
        (make_spec(4, 16, 32, 2, dt_limits=(0.05, 1.5)), ScanTile(16, 16, 1, 4, 48)),
    )
    for spec, tile in cases:
        problem = make_problem(spec, make_metadata(MIXED, MIXED_SAVES))
        found, state = run_scan(problem, tile)
        check_scan(problem, found, state, FP32_SCAN)


def check_bf16_states() -> None:
    spec = make_spec(2, 16, 32, 1, state_dtype=torch.bfloat16)
    for lengths, segment in (((1, 1, 1), 0), ((1, 18, 40), 0), ((1, 18, 40), 16)):
        problem = make_problem(spec, make_metadata(lengths, ((1, 1),)))
        found, state = run_scan(problem, ScanTile(16, 16, 1, 4, segment))
        check_scan(problem, found, state, FP32_SCAN, CUT_BF16)


def check_segments() -> None:
    """Long sequences whose segments begin close to each other, so that two starts fall into one window."""
    problem = make_problem(make_spec(1, 16, 16, 1), make_metadata((17, 33, 40, 3, 31, 16), is_new=(False,) * 6))
    found, state = run_scan(problem, ScanTile(16, 16, 1, 4, 16))
    check_scan(problem, found, state, FP32_SCAN)


def check_pieces_of_a_sequence() -> None:
    """A sequence in three batches gives what it gives in one, and in the same slot."""
    spec, tile = make_spec(2, 16, 32, 1), ScanTile(16, 16, 1, 4, 0)
    whole = make_problem(spec, make_metadata((66,), is_new=(True,)))
    state, start, rows = whole.ssm_state.clone(), 0, []
    for length in (40, 1, 25):
        part = replace(make_problem(spec, make_metadata((length,), is_new=(start == 0,))), d=whole.d)
        part.projection[:] = whole.projection[start : start + length]
        part.ssm_state[:] = state
        found, state = run_scan(part, tile)
        rows.append(found)
        start += length
    (expected, magnitude), (states, sizes) = scan_exactly(whole)
    slot = whole.metadata.slots
    assert_matches(torch.cat(rows), expected, FP32_SCAN, magnitude)
    assert_matches(state[slot], states[slot], FP32_SCAN, sizes[slot])


def check_sequences_do_not_touch() -> None:
    """NaN in one sequence stays there."""
    problem = make_problem(make_spec(1, 16, 16, 1), make_metadata((20, 20, 20), is_new=(True,) * 3))
    clean, clean_state = run_scan(problem, ScanTile(16, 16, 1, 4, 0))
    problem.projection[20:40] = float("nan")
    found, state = run_scan(problem, ScanTile(16, 16, 1, 4, 0))
    assert found[20:40].isnan().all()
    assert_same_bits(found[:20], clean[:20])
    assert_same_bits(found[40:], clean[40:])
    others = problem.metadata.slots[[0, 2]]
    assert_same_bits(state[others], clean_state[others])


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    # The logarithm of a step of zero, behind the end of a sequence, is minus infinity, and meant to be.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    check_convolutions()
    check_steps()
    check_scans()
    check_bf16_states()
    check_segments()
    check_pieces_of_a_sequence()
    check_sequences_do_not_touch()
