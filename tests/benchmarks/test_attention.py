"""The benchmark of attention, as far as it runs without a GPU, and its gate."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from eightfold.benchmarks.attention import SPECS, check, count, dense_call, make_batch, parse_batch
from eightfold.kernels.operations import AttentionSpec
from eightfold.kernels.reference import ReferenceAttention

SPEC = AttentionSpec(4, 2, 16, 0.25, None, torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "eightfold.benchmarks.attention"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "this benchmark needs a CUDA GPU\n"


def test_batches_by_their_text() -> None:
    assert parse_batch("2x1:40+1x20:30") == [(1, 40), (1, 40), (20, 30)]


def test_bytes_and_operations_of_a_batch() -> None:
    moved, operations = count(SPECS["llama"], parse_batch("64x1:4096"))
    assert moved == 64 * 4096 * 8 * 128 * 2 * 2 + 64 * 32 * 128 * 2 * 2
    assert operations == 64 * 4096 * 32 * 128 * 4
    _, operations = count(SPECS["llama"], [(3, 5)])
    assert operations == (3 + 4 + 5) * 32 * 128 * 4


@pytest.mark.parametrize("text", ["3x1:37", "2x33:33"])
def test_the_baseline_computes_the_same(text: str) -> None:
    batch, chunks = make_batch(SPEC, parse_batch(text), 0, "cpu"), parse_batch(text)
    call = dense_call(batch, chunks)
    assert call is not None
    check(batch, call().transpose(1, 2).flatten(0, 1).flatten(1))


@pytest.mark.parametrize("text", ["1x2:30", "1x1:20+1x1:21"])
def test_there_is_no_baseline_for_a_cached_context_or_unequal_lengths(text: str) -> None:
    assert dense_call(make_batch(SPEC, parse_batch(text), 0, "cpu"), parse_batch(text)) is None


def test_what_is_wrong_is_not_timed() -> None:
    batch = make_batch(SPEC, parse_batch("2x1:40+1x20:30"), 0, "cpu")
    found = ReferenceAttention().run(*batch.arguments)
    check(batch, found)
    for wrong in (found * 1.02, found.flip(0), torch.full_like(found, torch.nan)):
        with pytest.raises(SystemExit, match="error"):
            check(batch, wrong)
