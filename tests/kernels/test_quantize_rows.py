"""The fused quantizers of activations: bit for bit in the interpreter, compiled, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from eightfold.kernels import jit
from eightfold.kernels.quantize import quantize_tokens_reference
from eightfold.kernels.quantize_rows import BlockQuantized, RowOperation, TokenQuantized, quantize_rows, quantize_rows_kernel
from eightfold.kernels.reference import ReferenceFused
from eightfold.kernels.scale_layouts import ScaleLayout, arrange
from eightfold.quant import mxfp8
from tests.kernels.ahead_of_time import ptx
from tests.kernels.operands import equal_bits, wild

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")


@needs_triton
def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_rows"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("layout", ["token", "linear", "128x4", "8x4"])
def test_rounding_is_one_instruction_where_there_is_one(capability: int, layout: str) -> None:
    native = capability >= 89
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr"), "*bf16")
    types |= {"data_ptr": "*u8", "scale_ptr": "*fp32" if layout == "token" else "*u8", "eps": "fp32"}
    constants = {"operation": "add_norm", "layout": layout, "size": 4096, "k_padded": 4096, "padded_blocks": 128, "blocks": 128}
    constants |= {"normed": True, "native": native, "overlap": capability >= 90}
    text = ptx(quantize_rows_kernel, capability, types, constants, num_warps=8)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in text) == native
    assert ("griddepcontrol.wait" in text) == (capability >= 90)


@pytest.mark.parametrize(
    ("operation", "weight", "message"),
    [
        (RowOperation.NORM, None, "norm needs a weight, got none"),
        (RowOperation.ADD_NORM, torch.ones(32), "add_norm needs a residual, got none"),
    ],
)
def test_an_operation_without_its_operands_is_refused(
    operation: RowOperation, weight: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_rows(torch.ones(1, 32), None, operation, weight=weight, native=False, overlap=False)


@pytest.mark.parametrize("layout", [None, *ScaleLayout])
def test_no_rows_need_no_launch(layout: ScaleLayout | None) -> None:
    assert quantize_rows(torch.ones(0, 40), layout, native=False, overlap=False).data.shape == (0, 48 if layout is None else 64)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("layout", [None, *ScaleLayout])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (7, 33), (129, 576), (127, 1856), (3, 2689), (64, 4096), (1, 28672)])
def test_the_result_is_that_of_plain_torch(rows: int, k: int, layout: ScaleLayout | None) -> None:
    x = wild(rows, k).clamp(-3e38, 3e38).bfloat16()
    relu2 = ReferenceFused().relu2((x * 1e-20).clamp(-1e4, 1e4))
    for operation, given, made in (
        (RowOperation.NONE, x, x),
        (RowOperation.RELU2, (x * 1e-20).clamp(-1e4, 1e4), relu2),
    ):
        found = quantize_rows(given.cuda(), layout, operation, native=True, overlap=False)
        if isinstance(found, TokenQuantized):
            data, scale = quantize_tokens_reference(made.cuda())
            assert equal_bits(found.data, data)
            assert torch.equal(found.scale, scale)
        else:
            exact = mxfp8.quantize(made)
            assert equal_bits(found.data[:, :k].cpu(), exact.data)
            assert torch.equal(found.scales.data.cpu(), arrange(exact.scale, found.scales.layout).data)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("operation", [RowOperation.NORM, RowOperation.ADD_NORM, RowOperation.SILU_AND_MUL])
def test_fused_results_are_within_a_rounding_of_the_unfused(operation: RowOperation) -> None:
    """Sums of squares and exponentials may differ in the last bit of fp32, so a few elements may round to a neighbour."""
    rows, k, reference = 129, 4096, ReferenceFused()
    x = torch.randn(rows, 2 * k if operation is RowOperation.SILU_AND_MUL else k, device="cuda").bfloat16()
    weight, residual = torch.randn(k, device="cuda").bfloat16(), torch.randn(rows, k, device="cuda").bfloat16()
    if operation is RowOperation.SILU_AND_MUL:
        expected = reference.silu_and_mul(x)
    elif operation is RowOperation.NORM:
        expected = reference.rms_norm(x, weight, 1e-5)
    else:
        expected, _ = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
    options = {"weight": weight, "residual": residual, "eps": 1e-5}
    found = quantize_rows(x, ScaleLayout.LINEAR, operation, native=True, overlap=True, **options)  # type: ignore[arg-type]
    assert isinstance(found, BlockQuantized)
    exact = mxfp8.quantize(expected)
    assert (found.data.view(torch.uint8) != exact.data.view(torch.uint8)).float().mean() < 0.01
    found_values = mxfp8.dequantize(mxfp8.MXTensor(found.data, found.scales.need(ScaleLayout.LINEAR).view(rows, -1)))
    difference = found_values - mxfp8.dequantize(exact)
    assert float(difference.norm() / expected.float().norm()) < 5e-3
