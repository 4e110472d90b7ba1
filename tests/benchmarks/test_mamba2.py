"""The benchmark of Mamba2, as far as it runs without a GPU, and its gate."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eightfold.benchmarks.mamba2 import NEMOTRON, Batch, check, count, exactly, make_batch, parse_batch, poisoned
from eightfold.kernels.chunked_mamba import ChunkedMamba

SMALL = replace(NEMOTRON, num_heads=4, head_dim=8, state_size=16, num_groups=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "eightfold.benchmarks.mamba2"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "this benchmark needs a CUDA GPU\n"


def test_bytes_and_operations_of_a_batch() -> None:
    state, row = 64 * 64 * 128, 2 * 64 * 64 + 2 * 8 * 128 + 64
    assert count(NEMOTRON, parse_batch("64x1")) == (64 * (2 * state * 4 + row * 2), 64 * state * 4)
    half = replace(NEMOTRON, state_dtype=torch.bfloat16)
    assert count(half, parse_batch("16x2048"))[0] == 16 * state * 2 + 16 * 2048 * row * 2


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_baseline_computes_the_same(shape: tuple[int, int], dtype: torch.dtype) -> None:
    batch = make_batch(replace(SMALL, state_dtype=dtype), shape, 0, "cpu")
    before = batch.ssm_state.clone()
    norm, largest = check(batch, ChunkedMamba())
    assert 0 < norm < largest
    assert torch.equal(batch.ssm_state, before)


def test_a_prompt_begins_without_a_state() -> None:
    batch = make_batch(SMALL, (2, 5), 0, "cpu")
    empty = replace(batch, ssm_state=torch.zeros_like(batch.ssm_state))
    assert torch.equal(exactly(batch)[0], exactly(empty)[0])


class _Wrong(ChunkedMamba):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def scan(self, *arguments: object) -> Tensor:
        y = super().scan(*arguments)  # type: ignore[arg-type]
        state = arguments[7]
        assert isinstance(state, Tensor)
        if self.fault == "state":
            state *= 1.02
        if self.fault == "unwritten":
            return torch.empty(y.shape, dtype=y.dtype)
        return y * 1.02 if self.fault == "factor" else y


@pytest.mark.parametrize("fault", ["state", "unwritten", "factor"])
def test_what_is_wrong_is_not_timed(fault: str) -> None:
    batch: Batch = make_batch(SMALL, (3, 1), 0, "cpu")
    with pytest.raises(SystemExit, match="error"):
        check(batch, _Wrong(fault))


def test_fresh_memory_is_poisoned_while_it_is_checked() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all()
