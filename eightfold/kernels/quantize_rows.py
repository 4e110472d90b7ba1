"""Activations to FP8 on a GPU, one scale a token or one for each 32, fused with the operation that makes them.

One program takes a row: it computes norm or activation in fp32 as `fused.py` does, rounds to the dtype of the activations, and
quantizes what it rounded, so that the result is that of the two operations one after the other. The row stays in registers.
What bounds it is memory: the row is read once and written once as bytes, where the unfused pair also writes and reads it in 16
bits.

Formulas are those of `quantize.py`: per token scale = max |v| / 448 and v / scale; per 32 the ceil rule of `quant/mxfp8.py`. A
block of activations that holds NaN or infinity gets the scale NaN (255), so that the fault shows in every product of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.quantize import ROW_ALIGNMENT, power_of_two, to_e4m3
from eightfold.kernels.scale_layouts import LaidOutScales, ScaleLayout
from eightfold.quant.mxfp8 import BLOCK_SIZE


class RowOperation(Enum):
    """What a row goes through before it is quantized: nothing, RMS norm, residual add and norm, silu(gate) * up, or relu²."""

    NONE = "none"
    NORM = "norm"
    ADD_NORM = "add_norm"
    SILU_AND_MUL = "silu_and_mul"
    RELU2 = "relu2"


@dataclass(frozen=True, slots=True)
class TokenQuantized:
    """Activations with a scale a token: data `float8_e4m3fn [M, K']`, zero from K on; scale `float32 [M]`."""

    data: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class BlockQuantized:
    """Activations in MXFP8: data `float8_e4m3fn [M, K']`, K padded with zeros to a multiple of 32; scales with their layout."""

    data: Tensor
    scales: LaidOutScales


@kernel("num_rows")
def quantize_rows_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    operation: tl.constexpr,
    normed: tl.constexpr,
    layout: tl.constexpr,
    size: tl.constexpr,
    k_padded: tl.constexpr,
    padded_blocks: tl.constexpr,
    blocks: tl.constexpr,
    native: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One row v of `size` values: E4M3(v / scale), with a scale for the row (`layout` "token") or for each 32 of it.

    Shapes: x `[M, size]`, twice as wide for silu_and_mul, residual like x and written, weight `[size]`, data `uint8 [M,
    k_padded]`, scale `float32 [M]` or `uint8` in the formula of `scale_layouts`. Rows from `num_rows` on are padding of scales.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    is_row = row < num_rows
    offs_g = tl.arange(0, blocks)
    offs_k = offs_g[:, None] * 32 + tl.arange(0, 32)[None, :]
    valid = tl.where(is_row, offs_k < size, False)
    x = tl.load(x_ptr + row * x_stride + offs_k, mask=valid, other=0.0).to(tl.float32)
    if operation == "silu_and_mul":
        up = tl.load(x_ptr + row * x_stride + size + offs_k, mask=valid, other=0.0).to(tl.float32)
        x = x * tl.sigmoid(x) * up
    if operation == "relu2":
        x = tl.where(x < 0.0, 0.0, x * x)
    if operation == "add_norm":
        residual = residual_ptr + row * residual_stride + offs_k
        total = (x + tl.load(residual, mask=valid, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(residual, total, mask=valid)
        x = total.to(tl.float32)
    if normed:
        weight = tl.load(weight_ptr + offs_k, mask=offs_k < size, other=0.0).to(tl.float32)
        mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / size
        x = x * tl.rsqrt(mean + eps) * weight
    x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    if layout == "token":
        amax = tl.max(amax_bits, axis=0).to(tl.float32, bitcast=True)
        # A row of zeros gets the smallest scale, whose reciprocal is finite.
        scale = tl.where(amax * (1.0 / 448.0) < 1.1754943508222875e-38, 1.1754943508222875e-38, amax * (1.0 / 448.0))
        tl.store(scale_ptr + row, scale)
        code = to_e4m3(x * tl.div_rn(1.0, scale), native)
    else:
        ratio = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), tl.full((blocks,), 448.0, tl.float32))
        ratio_bits = tl.maximum(ratio.to(tl.int32, bitcast=True), 0x00800000)
        exponent = tl.where(amax_bits == 0, 127, (ratio_bits + 0x007FFFFF) >> 23)
        exponent = tl.where(amax_bits >= 0x7F800000, 254, exponent)
        scaled = x * power_of_two(254 - exponent)[:, None]
        code = to_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0), native)
        exponent = tl.where(amax_bits >= 0x7F800000, 255, exponent)
        if layout == "128x4":
            place = row // 128 * 128 * padded_blocks + row % 32 * 16 + row % 128 // 32 * 4
            place += offs_g // 4 * 512 + offs_g % 4
        elif layout == "8x4":
            place = row // 8 * 8 * padded_blocks + row % 8 * 4
            place += offs_g // 4 * 32 + offs_g % 4
        else:
            place = row * padded_blocks + offs_g
        tl.store(scale_ptr + place, exponent.to(tl.uint8), mask=offs_g < padded_blocks)
    tl.store(data_ptr + row * k_padded + offs_k, code, mask=tl.where(is_row, offs_k < k_padded, False))


def quantize_rows(
    x: Tensor,
    layout: ScaleLayout | None,
    operation: RowOperation = RowOperation.NONE,
    *,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 0.0,
    native: bool,
    overlap: bool,
) -> TokenQuantized | BlockQuantized:
    """Quantize the rows of an operation's result.

    Args:
        x: `[M, K]`, or `[M, 2 * K]` for SILU_AND_MUL, gates first; elements of a row beside each other.
        layout: of the scales of MXFP8; None gives each token one fp32 scale, and pads K to 16.
        operation: what comes first.
        weight: `[K]`, of a norm.
        residual: `[M, K]`, for ADD_NORM; becomes `residual + x`.
        eps: of a norm.
        native: whether the GPU rounds to E4M3 itself (compute capability 8.9 and up).
        overlap: whether the launch may begin before the kernel ahead of it ends (9.0 and up).

    Raises:
        ValueError: a norm without its weight, or ADD_NORM without a residual.
    """
    if weight is None and operation in (RowOperation.NORM, RowOperation.ADD_NORM):
        raise ValueError(f"{operation.value} needs a weight, got none")
    if residual is None and operation is RowOperation.ADD_NORM:
        raise ValueError("add_norm needs a residual, got none")
    m_size, size = x.shape[0], x.shape[1] // (2 if operation is RowOperation.SILU_AND_MUL else 1)
    alignment = ROW_ALIGNMENT if layout is None else BLOCK_SIZE
    k_padded = -(-size // alignment) * alignment
    num_blocks = -(-size // BLOCK_SIZE)
    data = torch.empty((m_size, k_padded), dtype=torch.float8_e4m3fn, device=x.device)
    rows, padded_blocks = (m_size, num_blocks) if layout is None else layout.padded(m_size, num_blocks)
    dtype, shape = (torch.float32, (m_size,)) if layout is None else (torch.uint8, (rows * padded_blocks,))
    scale = torch.empty(shape, dtype=dtype, device=x.device)
    blocks = 1 << (padded_blocks - 1).bit_length()
    if m_size > 0:
        quantize_rows_kernel[(rows,)](
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            data.view(torch.uint8),
            scale,
            m_size,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            operation=operation.value,
            normed=operation in (RowOperation.NORM, RowOperation.ADD_NORM),
            layout="token" if layout is None else layout.value,
            size=size,
            k_padded=k_padded,
            padded_blocks=padded_blocks,
            blocks=blocks,
            native=native,
            overlap=overlap,
            num_warps=max(1, min(16, blocks // 16)),
            **launch_options(overlap=overlap),
        )
    if layout is None:
        return TokenQuantized(data, scale)
    return BlockQuantized(data, LaidOutScales(scale, layout, m_size, num_blocks))
