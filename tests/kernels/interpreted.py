"""What Triton's interpreter can check without a GPU. A process of its own runs this, with TRITON_INTERPRET=1
set before triton loads.

The interpreter casts neither to E4M3 nor to bf16 correctly, and multiplies bf16 as integers: so rounding is that of the bits
(`native=False`), and activations and results are fp32.
"""

from __future__ import annotations

import os

import torch

from eightfold.kernels import gemm
from eightfold.kernels.gemm import FoldedWeight
from eightfold.kernels.quantize import dequantize_mxfp8, fold_mxfp8, quantize_mxfp8, quantize_tokens, quantize_tokens_reference
from eightfold.kernels.tuning import TileConfig
from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import ScaleRule
from tests.kernels.operands import equal_bits, fold_product, wild
from tests.oracle import assert_matches, product
from tests.tolerances import FP32


def check_quantizers() -> None:
    for rows, k in ((5, 64), (3, 70), (7, 1), (2, 33), (4, 2080)):
        w = wild(rows, k)
        for rule in ScaleRule:
            found, expected = quantize_mxfp8(w, rule, native=False), mxfp8.quantize(w, rule)
            assert equal_bits(found.data, expected.data), (rows, k, rule)
            assert torch.equal(found.scale, expected.scale), (rows, k, rule)
        folded, exact = fold_mxfp8(expected, native=False), mxfp8.fold(expected)
        assert equal_bits(folded.data[:, :k], exact.data), (rows, k)
        assert not folded.data.view(torch.uint8)[:, k:].any()
        assert torch.equal(folded.row_scale, exact.row_scale)
        assert abs(folded.relative_error - exact.relative_error) <= 1e-5 * exact.relative_error
        assert folded.max_error == exact.max_error
        assert torch.equal(dequantize_mxfp8(expected, torch.float32), mxfp8.dequantize(expected))


def check_tokens() -> None:
    for m, k in ((1, 1), (3, 300), (2, 9000)):
        x = wild(m, k)
        found, expected = quantize_tokens(x, native=False, overlap=False), quantize_tokens_reference(x)
        assert equal_bits(found[0], expected[0]), (m, k)
        assert torch.equal(found[1], expected[1]), (m, k)


def check_products() -> None:
    for m, n, k in ((1, 1, 1), (7, 32, 32), (17, 70, 300)):
        generator = torch.Generator().manual_seed(m)
        x, bias = torch.randn(m, k, generator=generator), torch.randn(n, generator=generator)
        mx = mxfp8.quantize(torch.randn(n, k, generator=generator))
        folded = fold_mxfp8(mx, native=False)
        weight = FoldedWeight(folded.data, torch.exp2(folded.row_scale.float() - 127), bias)
        a, scale = quantize_tokens(x, native=False, overlap=False)
        found = gemm.fold_gemm(a, scale, weight, TileConfig("tile", 64, 16, 128, 2, 4), torch.float32, overlap=False)
        expected, magnitude = fold_product(a, scale, weight)
        assert_matches(found, expected, FP32, magnitude)
        expected, magnitude = product(x, mxfp8.dequantize(mx))
        assert_matches(gemm.dequant_gemm(x, mx, bias), expected + bias.double(), FP32, magnitude + bias.double().abs())


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    check_quantizers()
    check_tokens()
    check_products()
