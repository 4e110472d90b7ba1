"""The GPU's quantizers, bit for bit against plain torch: interpreted without a GPU, for real with one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from eightfold.kernels import jit, quantize
from eightfold.kernels.quantize import dequantize_mxfp8, fold_mxfp8, quantize_mxfp8, quantize_tokens, quantize_tokens_reference
from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import ScaleRule
from tests.kernels.ahead_of_time import ptx
from tests.kernels.operands import equal_bits, wild

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")


@needs_triton
def test_kernels_in_the_interpreter() -> None:
    """Quantizers and products; `interpreted.py` has the checks."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_rounding_is_one_instruction_where_there_is_one(capability: int) -> None:
    native = capability >= 89
    types = {"w_ptr": "*bf16", "data_ptr": "*u8", "scale_ptr": "*u8", "not_finite_ptr": "*i32"}
    constants = {"ceil_rule": True, "blocks": 128, "native": native}
    text = ptx(quantize.quantize_mxfp8_kernel, capability, types, constants, num_warps=4)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == native
    types = {"x_ptr": "*bf16", "a_ptr": "*u8", "scale_ptr": "*fp32"}
    constants = {"block": 1024, "one_pass": True, "overlap": capability >= 90, "native": native}
    text = ptx(quantize.quantize_tokens_kernel, capability, types, constants, num_warps=2)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == native
    assert ("griddepcontrol.wait" in text) == (capability >= 90)


def test_tokens_by_hand() -> None:
    """A row whose largest magnitude is 448 has a scale of one; a row of zeros stays zero; K is padded to 16."""
    a, scale = quantize_tokens_reference(torch.tensor([[448.0, -1.0625, 0.0], [0.0, 0.0, 0.0]]))
    assert a.shape == (2, 16)
    assert a[0, :4].float().tolist() == [448.0, -1.0, 0.0, 0.0]  # 1.0625 is half way, and 1.0 is even
    assert scale[0] == 1.0
    assert not a[1].float().any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (7, 33), (129, 576), (127, 1856), (3, 2689), (64, 4096)])
def test_weights_are_those_of_the_format(rows: int, k: int, native: bool) -> None:
    w = wild(rows, k)
    for values in (w, w.clamp(-3e38, 3e38).bfloat16(), (w * 1e-3).clamp(-6e4, 6e4).half()):
        for rule in ScaleRule:
            expected = mxfp8.quantize(values, rule)
            found = quantize_mxfp8(values.cuda(), rule, native=native)
            assert equal_bits(found.data.cpu(), expected.data)
            assert torch.equal(found.scale.cpu(), expected.scale)
            folded, exact = fold_mxfp8(found, native=native), mxfp8.fold(expected)
            assert equal_bits(folded.data[:, :k].cpu(), exact.data)
            assert not folded.data.view(torch.uint8)[:, k:].any()
            assert torch.equal(folded.row_scale.cpu(), exact.row_scale)
            assert folded.relative_error == pytest.approx(exact.relative_error, rel=1e-5)
            assert folded.max_error == exact.max_error
            assert torch.equal(dequantize_mxfp8(found, torch.float32).cpu(), mxfp8.dequantize(expected))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_index(bad: float) -> None:
    w = torch.ones(3, 64, device="cuda")
    w[1, 40] = bad
    with pytest.raises(ValueError, match=r"at index \[1, 40\]"):
        quantize_mxfp8(w, native=True)


@pytest.mark.gpu
@needs_gpu
def test_a_weight_with_nan_is_not_folded() -> None:
    mx = quantize_mxfp8(torch.ones(3, 64, device="cuda"), native=True)
    mx.scale[2, 1] = mxfp8.SCALE_NAN
    with pytest.raises(ValueError, match="finite"):
        fold_mxfp8(mx, native=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (7, 33), (129, 576), (2, 2688), (127, 4096), (3, 9001), (1, 28672)])
def test_tokens(m: int, k: int, dtype: torch.dtype, native: bool) -> None:
    x = (wild(m, k) * (1e-3 if dtype == torch.float16 else 1.0)).clamp(-6e4, 6e4).to(dtype).cuda()
    # A slice of a wider row: the stride is not K.
    x = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :k]
    found, expected = quantize_tokens(x, native=native, overlap=False), quantize_tokens_reference(x)
    assert equal_bits(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
