"""The block-scaled product: its instruction in the PTX, and its results in the interpreter and where there is such a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from eightfold.kernels import jit
from eightfold.kernels.native_gemm import BLOCK_K, BLOCK_N, choose_block_m, native_gemm_kernel
from tests.kernels.ahead_of_time import ptx

needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
INSTRUCTIONS = {
    100: ("tcgen05.mma", "kind::mxf8f6f4.block_scale"),
    103: ("tcgen05.mma", "kind::mxf8f6f4.block_scale"),
    120: ("mma.sync.aligned", "kind::mxf8f6f4.block_scale"),
    121: ("mma.sync.aligned", "kind::mxf8f6f4.block_scale"),
}


def compiled(capability: int, num_tokens: int, block_n: int = BLOCK_N) -> str:
    types = dict.fromkeys(("a_ptr", "w_ptr"), "*fp8e4nv") | dict.fromkeys(("a_scale_ptr", "w_scale_ptr"), "*u8")
    types |= dict.fromkeys(("bias_ptr", "y_ptr"), "*bf16")
    blocks = {"block_n": block_n, "block_m": choose_block_m(num_tokens), "block_k": BLOCK_K}
    return ptx(native_gemm_kernel, capability, types, {"has_bias": True, "overlap": True, **blocks}, num_warps=4, num_stages=3)


@needs_triton
@pytest.mark.parametrize("num_tokens", [1, 64, 2048])
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_the_tensor_core_applies_the_scales(capability: int, num_tokens: int) -> None:
    text = compiled(capability, num_tokens)
    for words in INSTRUCTIONS[capability]:
        assert words in text
    assert "bf16.bf16" not in text
    assert "kind::f16" not in text
    assert "griddepcontrol.wait" in text


@needs_triton
def test_a_narrow_tile_would_fall_back_in_silence() -> None:
    """What the search in the PTX is for: with 64 rows on the left there is no such instruction."""
    assert "block_scale" not in compiled(100, 64, block_n=64)


def test_tiles_hold_the_tokens() -> None:
    assert [choose_block_m(tokens) for tokens in (1, 16, 17, 127, 128, 129, 8192)] == [16, 16, 32, 128, 128, 128, 128]


@needs_triton
def test_products_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_native"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
