"""FP8 weights that are not MX: E4M3 elements under fp32 scales, as checkpoints hold them that were quantized by others.

Files have one scale for a whole tensor, one for a row, or one for a block such as 128 x 128. In memory there is one form for
all of them: a scale for each row and each group of columns. Rows of a fused weight, whose parts have scales of their own, then
need no common scale, and nothing is rounded a second time; a block that a part's last rows do not fill needs no padding. The
value of an element is

    w[n, k] = data[n, k] * scale[n, k // group_size]

which is exact in fp64, and rounded once in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import MXTensor

# Elements that one pass of dequantize() or copy() holds.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class FP8Tensor:
    """A tensor in E4M3 with fp32 scales.

    Attributes:
        data: E4M3 elements, `float8_e4m3fn [..., N, K]`.
        scale: factors, `float32 [..., N, ceil(K / group_size)]`.
        group_size: columns under one scale; K where a row has one.
        input_scale: the scale that activations are quantized with where that was settled in calibration, for backends that
            quantize them; None where it follows from each token.
    """

    data: Tensor
    scale: Tensor
    group_size: int
    input_scale: float | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != torch.float8_e4m3fn or self.scale.dtype != torch.float32:
            raise ValueError(
                f"FP8Tensor needs float8_e4m3fn data and float32 scales, got {self.data.dtype} and {self.scale.dtype}"
            )
        expected = (*self.data.shape[:-1], -(-self.data.shape[-1] // self.group_size))
        if tuple(self.scale.shape) != expected:
            raise ValueError(f"FP8Tensor data {tuple(self.data.shape)} needs scales {expected}, got {tuple(self.scale.shape)}")

    @property
    def shape(self) -> torch.Size:
        """Shape of the elements, `[..., N, K]`."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales."""
        return self.data.nbytes + self.scale.nbytes

    def __getitem__(self, rows: int | slice) -> FP8Tensor:
        """Select along the first dimension, as a view."""
        if self.data.ndim < 2:
            raise IndexError("an FP8Tensor of one dimension has no rows to select")
        return replace(self, data=self.data[rows], scale=self.scale[rows])


WeightTensor: TypeAlias = MXTensor | FP8Tensor | Tensor
"""A weight in any of its forms."""


def from_blocks(data: Tensor, scale: Tensor, block: tuple[int, int] | None, *, input_scale: float | None = None) -> FP8Tensor:
    """An FP8Tensor from scales as files have them.

    Args:
        data: `float8_e4m3fn [..., N, K]`.
        scale: floats: one number for the tensor (or for each matrix of `[E, N, K]`), one for each row, or one for each block.
        block: rows and columns of a block; None where the scale is of the tensor or of its rows.
        input_scale: as in `FP8Tensor`.

    Raises:
        ValueError: the scale has none of these shapes.
    """
    *outer, n, k = data.shape
    factors = scale.float()
    if block is not None:
        rows, group = block
        grid = (*outer, -(-n // rows), -(-k // group))
        if factors.numel() != torch.Size(grid).numel():
            raise ValueError(f"a scale of shape {list(scale.shape)} where blocks of {rows} x {group} need {list(grid)}")
        by_row = factors.reshape(grid).repeat_interleave(rows, dim=-2)[..., :n, :]
        return FP8Tensor(data, by_row.contiguous(), group, input_scale)
    shape = (*outer, n, 1)
    matrices = torch.Size(outer).numel()
    if factors.numel() == matrices * n:
        by_row = factors.reshape(shape)
    elif factors.numel() in (1, matrices):
        by_row = factors.reshape(*(outer if factors.numel() == matrices else [1] * len(outer)), 1, 1).expand(shape)
    else:
        raise ValueError(f"a scale of shape {list(scale.shape)} where the tensor needs one number, or one for each of {n} rows")
    return FP8Tensor(data, by_row.contiguous(), k, input_scale)


def dequantize(fp8: FP8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values `[..., N, K]` of an FP8Tensor, computed in fp32."""
    k = fp8.shape[-1]
    out = torch.empty(fp8.shape, dtype=dtype, device=fp8.data.device)
    if out.numel() == 0:
        return out
    data, scale, rows = fp8.data.reshape(-1, k), fp8.scale.reshape(-1, fp8.scale.shape[-1]), out.view(-1, k)
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        factors = scale[chunk].repeat_interleave(fp8.group_size, dim=-1)[:, :k]
        rows[chunk] = data[chunk].float() * factors
    return out


def widen(weight: WeightTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a weight in any form, as `dtype`."""
    match weight:
        case MXTensor():
            return mxfp8.dequantize(weight, dtype)
        case FP8Tensor():
            return dequantize(weight, dtype)
    return weight.to(dtype)


def empty_like(source: MXTensor | FP8Tensor, shape: tuple[int, ...], allocate: mxfp8.Allocate) -> MXTensor | FP8Tensor:
    """Storage of another shape in the form of `source`, whose contents are undefined, for `copy()` to fill."""
    if isinstance(source, MXTensor):
        return mxfp8.empty(shape, allocate)
    is_by_row = source.group_size == source.shape[-1]
    group = shape[-1] if is_by_row else source.group_size
    scale = allocate((*shape[:-1], -(-shape[-1] // group)), torch.float32)
    return FP8Tensor(allocate(shape, torch.float8_e4m3fn), scale, group, source.input_scale)


def copy(source: MXTensor | FP8Tensor, target: MXTensor | FP8Tensor) -> None:
    """Copy elements and scales as they are, some rows at a time.

    Raises:
        ValueError: an element or a scale is NaN or infinite, naming where; the two have different forms.
    """
    if type(source) is not type(target) or source.scale.shape != target.scale.shape:
        raise ValueError(f"{type(source).__name__} {tuple(source.shape)} does not go into {type(target).__name__}")
    step = max(1, _CHUNK_ELEMENTS // max(1, source.data[:1].numel()))
    for start in range(0, len(source.data), step):
        rows = slice(start, start + step)
        bad = (source.data[rows].view(torch.uint8) & 0x7F) == 0x7F  # NaN is 0x7F and 0xFF, and there is no infinity
        _refuse("an element", bad, start)
        scale = source.scale[rows]
        _refuse("a scale", scale == mxfp8.SCALE_NAN if isinstance(source, MXTensor) else ~torch.isfinite(scale), start)
        target.data[rows].copy_(source.data[rows])
        target.scale[rows].copy_(scale)


def _refuse(what: str, bad: Tensor, start: int) -> None:
    if bool(bad.any()):
        first, *rest = (int(index) for index in bad.nonzero()[0])
        raise ValueError(f"NaN in {what} at index {[start + first, *rest]}")
