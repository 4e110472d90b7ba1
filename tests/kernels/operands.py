"""Operands and measures that the tests of the GPU's kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from eightfold.kernels.gemm import FoldedWeight
from eightfold.quant import mxfp8
from tests.oracle import product


def wild(rows: int, k: int, *, seed: int = 0, device: str = "cpu") -> Tensor:
    """fp32 `[rows, k]` with rows of all magnitudes, a row and a block of zeros, and elements near the rounding's borders."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, k, generator=generator)
    w *= torch.exp2(torch.randint(-20, 21, (rows, k), generator=generator).float())
    w *= torch.exp2(torch.randint(-100, 90, (rows, 1), generator=generator).float())
    if rows > 1:
        w[0] = 0.0
    w[-1, :32] = 0.0
    return w.to(device)


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two FP8 tensors hold the same bytes."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def fold_product(a: Tensor, scale: Tensor, weight: FoldedWeight) -> tuple[Tensor, Tensor]:
    """The fp64 result `[M, N]` of the operands that a folded product gets, and the sum of magnitudes behind each element."""
    tokens = a.double() * scale.double()[:, None]
    result, magnitude = product(tokens, weight.data.double() * weight.row_scale.double()[:, None])
    if weight.bias is not None:
        result, magnitude = result + weight.bias.double(), magnitude + weight.bias.double().abs()
    return result, magnitude


def make(n: int, k: int, *, seed: int = 0) -> mxfp8.MXTensor:
    """A Gaussian weight `[n, k]` in MXFP8, on the GPU."""
    mx = mxfp8.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)))
    return mxfp8.MXTensor(mx.data.cuda(), mx.scale.cuda())


def tokens(m: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 9) -> Tensor:
    """Gaussian activations `[m, k]`, on the GPU."""
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()
