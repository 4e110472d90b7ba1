"""What Triton's interpreter can check of the block-scaled product; see `interpreted.py`."""

from __future__ import annotations

import os
from unittest import mock

import torch

from eightfold.kernels.native_gemm import native_gemm
from eightfold.kernels.quantize_rows import BlockQuantized, quantize_rows
from eightfold.kernels.scale_layouts import ScaleLayout
from eightfold.quant import mxfp8
from tests.conftest import poison
from tests.oracle import assert_matches, product
from tests.tolerances import FP32


def check_products() -> None:
    for m, n, k in ((1, 1, 1), (7, 32, 32), (17, 130, 576), (130, 33, 100)):
        x, bias = torch.randn(m, k), torch.randn(n) if m % 2 else None
        # Columns of unlike size: a scale applied to its neighbour shows.
        spread = torch.exp2(torch.randint(-6, 7, (k,)).float())
        mx = mxfp8.quantize(torch.randn(n, k) / spread)
        a = quantize_rows(x * spread, ScaleLayout.LINEAR, native=False, overlap=False)
        assert isinstance(a, BlockQuantized)
        found = native_gemm(a, mx, bias, torch.float32, overlap=False)
        expected, magnitude = product(mxfp8.dequantize(mxfp8.quantize(x * spread)), mxfp8.dequantize(mx))
        if bias is not None:
            expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
        assert_matches(found, expected, FP32, magnitude)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    torch.manual_seed(0)
    make = torch.empty
    with mock.patch.object(torch, "empty", lambda *sizes, **options: poison(make(*sizes, **options))):
        check_products()
