"""The backend `triton`: what it declines and why, and its results where there is a GPU for it."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels import jit
from eightfold.kernels.cuda_native import BLOCK_SCALED, GFX950, NativeLinear
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.registry import Hardware
from eightfold.quant import mxfp8
from tests.kernels.operands import make, tokens
from tests.oracle import assert_matches, product
from tests.tolerances import BF16

needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
has_instruction = torch.cuda.is_available() and torch.cuda.get_device_capability() in BLOCK_SCALED


def hardware(capability: tuple[int, int] | None, *features: str) -> Hardware:
    device = torch.device("cpu" if capability is None and not features else "cuda")
    return Hardware(device, "a device", capability, frozenset(features), 1 << 34, 8)


def spec(weight_format: str = "mxfp8", dtype: torch.dtype = torch.bfloat16) -> LinearSpec:
    return LinearSpec("layer", 64, 64, weight_format, dtype)


@needs_triton
def test_each_gpu_with_the_instruction_is_taken_and_no_other() -> None:
    backend = NativeLinear()
    for capability in BLOCK_SCALED:
        assert backend.declines(spec(), hardware(capability)) is None
    for capability in ((8, 0), (8, 9), (9, 0), (9, 5), (11, 0)):
        assert f"this GPU has {capability[0]}.{capability[1]}" in str(backend.declines(spec(), hardware(capability)))
    assert backend.declines(spec(), hardware(None, GFX950)) is None
    for other in (hardware(None), hardware(None, "gfx942")):
        assert backend.declines(spec(), other) == "needs a CUDA GPU or gfx950"


@needs_triton
def test_what_else_is_declined_and_why() -> None:
    backend, gpu = NativeLinear(), hardware((10, 0))
    assert backend.declines(spec("bfloat16"), gpu) == "bfloat16 weights"
    assert "float32 activations" in str(backend.declines(spec(dtype=torch.float32), gpu))
    assert backend.declines(spec(dtype=torch.float16), gpu) is None


def test_a_weight_that_it_cannot_take_is_refused() -> None:
    with pytest.raises(TypeError, match="takes an MXTensor"):
        NativeLinear().prepare(torch.ones(2, 32), None)
    mx = mxfp8.quantize(torch.ones(2, 32))
    mx.scale[1] = mxfp8.SCALE_NAN
    with pytest.raises(ValueError, match="NaN among the scales"):
        NativeLinear().prepare(mx, None)


@pytest.mark.gpu
@pytest.mark.skipif(not has_instruction, reason="needs a GPU with block-scaled tensor cores")
@pytest.mark.parametrize(("n", "k"), [(1, 1), (32, 32), (1856, 576), (130, 33), (2688, 1856)])
@pytest.mark.parametrize("m", [1, 7, 33, 127, 129, 600])
def test_results_are_those_of_the_same_operands(m: int, n: int, k: int) -> None:
    assert NativeLinear().declines(spec(), detect()) is None
    weight, x = make(n, k), tokens(m, k)
    found = NativeLinear().run(x, NativeLinear().prepare(weight, None))
    expected, magnitude = product(mxfp8.dequantize(mxfp8.quantize(x)), mxfp8.dequantize(weight))
    assert_matches(found, expected, BF16, magnitude)
