"""What Triton's interpreter can check of the fused quantizers of activations, bit for bit; see `interpreted.py`."""

from __future__ import annotations

import os
import warnings
from functools import partial
from unittest import mock

import torch

from eightfold.kernels.quantize import quantize_tokens_reference
from eightfold.kernels.quantize_rows import BlockQuantized, RowOperation, TokenQuantized, quantize_rows
from eightfold.kernels.reference import ReferenceFused
from eightfold.kernels.scale_layouts import ScaleLayout, arrange
from eightfold.quant import mxfp8
from tests.conftest import poison
from tests.kernels.operands import equal_bits, wild

SIZES = ((1, 1), (7, 33), (2, 576))


def check_bits(x: torch.Tensor, found: TokenQuantized | BlockQuantized) -> None:
    """The result is that of quantizing x `[M, K]` in plain torch."""
    k = x.shape[1]
    if isinstance(found, TokenQuantized):
        data, scale = quantize_tokens_reference(x)
        assert equal_bits(found.data, data)
        assert torch.equal(found.scale, scale)
        return
    exact = mxfp8.quantize(x)
    assert equal_bits(found.data[:, :k], exact.data)
    assert not found.data.view(torch.uint8)[:, k:].any()
    assert torch.equal(found.scales.data, arrange(exact.scale, found.scales.layout).data)


def check_plain() -> None:
    for rows, k in (*SIZES, (129, 40), (3, 1856)):
        x = wild(rows, k)
        # A slice of a wider row: the stride is not K.
        sliced = torch.cat((x, torch.full_like(x, float("nan"))), dim=1)[:, :k]
        for layout in (None, *ScaleLayout):
            check_bits(x, quantize_rows(sliced, layout, native=False, overlap=False))


def check_fused() -> None:
    reference, eps = ReferenceFused(), 1e-5
    for rows, k in SIZES:
        x, residual, wide = (torch.randn(rows, width).half() for width in (k, k, 2 * k))
        weight = torch.randn(k).half()
        for layout in (None, *ScaleLayout):
            quantized = partial(quantize_rows, native=False, overlap=False)
            found = quantized(wide, layout, RowOperation.SILU_AND_MUL)
            check_bits(reference.silu_and_mul(wide), found)
            check_bits(reference.relu2(x), quantized(x, layout, RowOperation.RELU2))
            found = quantized(x, layout, RowOperation.NORM, weight=weight, eps=eps)
            check_bits(reference.rms_norm(x, weight, eps), found)
            total = residual.clone()
            found = quantized(x, layout, RowOperation.ADD_NORM, weight=weight, residual=total, eps=eps)
            normed, expected = reference.add_rms_norm(x, residual.clone(), weight, eps)
            assert torch.equal(total, expected)
            check_bits(normed, found)


def check_not_finite() -> None:
    """NaN and infinity reach the scale of their block or token, and no other."""
    x = torch.ones(3, 96)
    x[1, 40], x[2, 70] = float("nan"), float("inf")
    found = quantize_rows(x, ScaleLayout.LINEAR, native=False, overlap=False)
    assert isinstance(found, BlockQuantized)
    assert (found.scales.data.view(3, 3) == 255).nonzero().tolist() == [[1, 1], [2, 2]]
    token = quantize_rows(x, None, native=False, overlap=False)
    assert isinstance(token, TokenQuantized)
    assert token.scale.isfinite().tolist() == [True, False, False]


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    # Infinity times the reciprocal of its own scale, which is NaN and meant to be.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    torch.manual_seed(0)
    make = torch.empty
    with mock.patch.object(torch, "empty", lambda *sizes, **options: poison(make(*sizes, **options))):
        check_plain()
        check_fused()
        check_not_finite()
