"""Chunks of sequences and steps of all sequences against the reference, which takes a token after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from eightfold.kernels.chunked_mamba import CHUNK, ChunkedMamba
from eightfold.kernels.operations import MambaSpec, StateMetadata
from eightfold.kernels.reference_mixers import ReferenceMamba

SLOTS = 12
OURS, ORACLE = ChunkedMamba(), ReferenceMamba()


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    is_new: tuple[bool, ...]
    saves: tuple[tuple[int, int], ...] = ()  # of which sequence, after how many tokens
    groups: int = 2
    state_dtype: torch.dtype = torch.float32


CASES = {
    "decodes": Case((1, 1, 1), (False, True, False)),
    "decodes that are saved": Case((1, 1, 1), (False, True, False), ((0, 1), (2, 1))),
    "one long": Case((3 * CHUNK + 5,), (True,)),
    "unequal": Case((7, 1, CHUNK, CHUNK + 1), (True, False, False, True), ((0, 7), (2, 16), (2, 32), (3, CHUNK))),
    "bf16 states": Case((5, 33), (False, True), ((1, 16),), groups=1, state_dtype=torch.bfloat16),
    "a group for each head": Case((70, 3), (False, False), groups=4),
}


def spec(case: Case) -> MambaSpec:
    return MambaSpec("mixer", 4, 5, 7, case.groups, 4, (0.01, 0.9), torch.float32, case.state_dtype)


def metadata(case: Case) -> StateMetadata:
    count = len(case.lengths)
    return StateMetadata(
        slots=torch.tensor([SLOTS - 1 - index for index in range(count)]),
        is_new=torch.tensor(case.is_new),
        query_start=torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32),
        save_sequences=torch.tensor([sequence for sequence, _ in case.saves], dtype=torch.int64),
        save_lengths=torch.tensor([taken for _, taken in case.saves], dtype=torch.int64),
        save_slots=torch.arange(len(case.saves)),
        max_query_len=max(case.lengths),
    )


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def states(shape: tuple[int, ...], case: Case, seed: int) -> torch.Tensor:
    """Random ones in the slots that are read, NaN in all others."""
    found = torch.full((SLOTS, *shape), torch.nan)
    for index, is_new in enumerate(case.is_new):
        if not is_new:
            found[SLOTS - 1 - index] = randn(*shape, seed=seed + index)
    return found.to(case.state_dtype)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_scan_is_the_references(case: Case) -> None:
    tokens, asked = sum(case.lengths), spec(case)
    wide = randn(tokens, 4 * 5 + 2 * case.groups * 7 + 4, seed=1)  # views of one projection, rows apart
    x, b, c, dt = wide.split([20, case.groups * 7, case.groups * 7, 4], dim=1)
    operands = (
        x.unflatten(1, (4, 5)),
        3 * dt,
        -torch.rand(4, generator=torch.Generator().manual_seed(2)) - 0.1,
        b.unflatten(1, (case.groups, 7)),
        c.unflatten(1, (case.groups, 7)),
        randn(4, seed=3),
        randn(4, seed=4),
    )
    ours, oracles = states((4, 5, 7), case, 5), states((4, 5, 7), case, 5)
    found = OURS.scan(*operands, ours, metadata(case), asked)
    expected = ORACLE.scan(*operands, oracles, metadata(case), asked)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    tolerance = 1e-4 if case.state_dtype == torch.float32 else 2**-7
    assert torch.allclose(ours.float(), oracles.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_convolution_is_the_references(case: Case, has_bias: bool) -> None:
    x, weight = randn(sum(case.lengths), 6, seed=1), randn(6, 4, seed=2)
    bias = randn(6, seed=3) if has_bias else None
    ours, oracles = states((6, 3), case, 4), states((6, 3), case, 4)
    found = OURS.conv(x, weight, bias, ours, metadata(case), spec(case))
    expected = ORACLE.conv(x, weight, bias, oracles, metadata(case), spec(case))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.nan_to_num(9e9), oracles.nan_to_num(9e9))
