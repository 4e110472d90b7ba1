"""The GPU's backend for attention: what it declines, and which kernels it runs for a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eightfold.kernels import jit
from eightfold.kernels.cuda_attention import TritonAttention, describe
from eightfold.kernels.operations import AttentionSpec
from eightfold.kernels.registry import Hardware
from tests.kernels.attention_cases import LONG, MIXED, TOLERANCES, attend_exactly, make_case
from tests.oracle import assert_matches

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
SPEC = AttentionSpec(32, 8, 128, 1.0, None, torch.bfloat16)


def hardware(*capability: int) -> Hardware:
    return Hardware(torch.device("cuda"), "a GPU", (capability[0], capability[1]), frozenset(), 1 << 34, 8)


@needs_triton
def test_what_is_declined_and_why() -> None:
    declines = TritonAttention().declines
    cpu = Hardware(torch.device("cpu"), "a CPU", None, frozenset(), 1 << 34, 8)
    assert declines(SPEC, cpu) == "needs a CUDA GPU"
    assert declines(SPEC, hardware(7, 5)) == "needs compute capability 8.0 and up, and this GPU has 7.5"
    assert declines(replace(SPEC, head_dim=288), hardware(9, 0)) == "heads 288 wide, over 256"
    assert declines(replace(SPEC, num_kv_heads=1, num_heads=71), hardware(9, 0)) == "71 query heads to a kv head, over 64"
    assert declines(replace(SPEC, activation_dtype=torch.float64), hardware(9, 0)) == "torch.float64 activations"
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert declines(replace(SPEC, activation_dtype=dtype, sliding_window=7), hardware(*capability)) is None


@needs_triton
def test_an_empty_batch_has_an_empty_result() -> None:
    case = make_case([(1, 1)], 4, 2, 64)
    found = TritonAttention().run(case.query[:0], case.key_cache, case.value_cache, case.metadata, case.spec)
    assert found.shape == (0, 256)


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "chunks",
    [LONG, MIXED, [(700, 700), (700, 2000)], [(1, 900)] * 40 + [(2048, 2048)], [(100, 100), (1, 1)]],
    ids=["decodes", "mixed", "equal chunks", "decodes and a prompt", "a prompt and a decode"],
)
def test_every_token_of_a_batch_is_right(chunks: list[tuple[int, int]], dtype: torch.dtype) -> None:
    case = make_case(chunks, 32, 8, 128, dtype=dtype, device="cuda")
    found = TritonAttention().run(case.query, case.key_cache, case.value_cache, case.metadata, case.spec)
    expected, magnitude = (exact.flatten(1) for exact in attend_exactly(case))
    assert_matches(found, expected, TOLERANCES[dtype], magnitude)


@pytest.mark.gpu
@gpu_test
def test_launches_depend_on_the_gpu() -> None:
    device = describe(torch.device("cuda", 0))
    assert device.num_sms == torch.cuda.get_device_properties(0).multi_processor_count
    assert device.shared_bytes >= 99 << 10
    assert device.overlap == (torch.cuda.get_device_capability(0) >= (9, 0))
