"""Quantizers on a GPU: weights to MXFP8 and its folded form, activations to FP8 with a scale for each token.

All are bound by memory: a weight is read once and written once, a row of activations is held in registers between its maximum
and its rounding. They are equal, bit for bit, to `quant/mxfp8.py` and to `quantize_tokens_reference` below.

Rounding to E4M3 is an instruction from compute capability 8.9 on (`native`). Elsewhere, and in Triton's interpreter, whose own
cast is wrong, it is integer arithmetic on the bits of the fp32 number.

Scales are computed on bits too, for the reasons in `quant/mxfp8.py`. What is divided is divided with correct rounding: the fast
division of a GPU may be off by a bit, which would move a scale at a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import E4M3_MAX, FoldedTensor, MXTensor, ScaleRule

# Rows of FP8 operands are padded to this many bytes, which the copy engine and the library ask for.
ROW_ALIGNMENT = 16
_TINY = torch.finfo(torch.float32).tiny


@kernel()
def to_e4m3(x: tl.tensor, native: tl.constexpr) -> tl.tensor:
    """The bytes (uint8) of x (fp32, of magnitude up to 464, or NaN) rounded to E4M3, to nearest, ties to even."""
    if native:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Subnormals are multiples of 2^-9. At 2^14 that is an fp32 number's last bit, so the sum rounds there and counts them.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    # Normals drop 20 bits of mantissa, to even, and the bias of their exponent goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(magnitude < (121 << 23), subnormal, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@kernel()
def from_e4m3(code: tl.tensor) -> tl.tensor:
    """The values (fp32) of bytes (uint8) of E4M3 that are not NaN: the bits, moved into place, are the value times 2^-120."""
    wide = code.to(tl.uint32)
    return (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@kernel()
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """2^(exponent - 127) in fp32 for int32 exponents 0..254; 0 is the subnormal 2^-127."""
    return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)


@kernel()
def quantize_tokens_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    k_size: tl.tensor,
    k_padded: tl.tensor,
    stride_x: tl.tensor,
    block: tl.constexpr,
    one_pass: tl.constexpr,
    overlap: tl.constexpr,
    native: tl.constexpr,
) -> None:
    """One token: a[m, k] = E4M3(x[m, k] / scale[m]) with scale[m] = max_k |x[m, k]| / 448; a is zero for k >= K.

    Shapes: x `[M, K]` in any float dtype, a `uint8 [M, K']`, scale `float32 [M]`. Rows longer than `block` are read twice.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    x_row = x_ptr + row * stride_x
    a_row = a_ptr + row * k_padded
    x = tl.load(x_row + offsets, mask=offsets < k_size, other=0.0).to(tl.float32)
    largest = tl.abs(x)
    if not one_pass:
        for start in range(block, k_size, block):
            x = tl.load(x_row + start + offsets, mask=start + offsets < k_size, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
    # A row of zeros gets the smallest scale, whose reciprocal is finite.
    scale = tl.maximum(tl.max(largest, axis=0) * (1.0 / 448.0), 1.1754943508222875e-38)
    inverse = tl.div_rn(1.0, scale)
    tl.store(scale_ptr + row, scale)
    if one_pass:
        tl.store(a_row + offsets, to_e4m3(x * inverse, native), mask=offsets < k_padded)
    else:
        for start in range(0, k_padded, block):
            x = tl.load(x_row + start + offsets, mask=start + offsets < k_size, other=0.0).to(tl.float32)
            tl.store(a_row + start + offsets, to_e4m3(x * inverse, native), mask=start + offsets < k_padded)


@kernel()
def quantize_mxfp8_kernel(
    w_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    not_finite_ptr: tl.tensor,
    k_size: tl.tensor,
    num_blocks: tl.tensor,
    ceil_rule: tl.constexpr,
    blocks: tl.constexpr,
    native: tl.constexpr,
) -> None:
    """`blocks` blocks of a row: the formulas of `quant.mxfp8.quantize`.

    Shapes: w `[R, K]` in any float dtype, data `uint8 [R, K]`, scale `uint8 [R, num_blocks]`, not_finite `int32 [1]`, set to 1
    where w holds NaN or infinity.
    """
    first = tl.program_id(0).to(tl.int64) * blocks
    row = tl.program_id(1).to(tl.int64)
    offs_g = tl.arange(0, blocks)
    offs_k = offs_g[:, None] * 32 + tl.arange(0, 32)[None, :]
    start = row * k_size + first * 32
    valid = offs_k < k_size - first * 32
    values = tl.load(w_ptr + start + offs_k, mask=valid, other=0.0).to(tl.float32)
    # As integers, the bits of NaN and infinity are above those of every finite magnitude.
    amax_bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    tl.atomic_max(not_finite_ptr + offs_g * 0, 1, mask=amax_bits >= 0x7F800000)
    if ceil_rule:
        ratio = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), tl.full((blocks,), 448.0, tl.float32))
        ratio_bits = tl.maximum(ratio, 1.1754943508222875e-38).to(tl.int32, bitcast=True)
        exponent = (ratio_bits + 0x007FFFFF) >> 23
    else:
        exponent = tl.maximum((amax_bits >> 23) - 8, 0)
    exponent = tl.where(amax_bits == 0, 127, exponent)
    scaled = values * power_of_two(254 - exponent)[:, None]
    code = to_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0), native)
    tl.store(data_ptr + start + offs_k, code, mask=valid)
    tl.store(scale_ptr + row * num_blocks + first + offs_g, exponent.to(tl.uint8), mask=offs_g < num_blocks - first)


@kernel()
def fold_kernel(
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    folded_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    statistics_ptr: tl.tensor,
    k_size: tl.tensor,
    k_padded: tl.tensor,
    num_blocks: tl.tensor,
    blocks: tl.constexpr,
    native: tl.constexpr,
) -> None:
    """One row: the formulas of `quant.mxfp8.fold`.

    Shapes: data `uint8 [R, K]`, scale `uint8 [R, num_blocks]`, folded `uint8 [R, K']` (zero for k >= K), row_scale `uint8 [R]`,
    statistics `float32 [R, 4]`: squared change and squared values in units of the row's scale, largest change, and 1 where the
    row holds NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.arange(0, blocks)
    offs_k = offs_g[:, None] * 32 + tl.arange(0, 32)[None, :]
    code = tl.load(data_ptr + row * k_size + offs_k, mask=offs_k < k_size, other=0)
    exponent = tl.load(scale_ptr + row * num_blocks + offs_g, mask=offs_g < num_blocks, other=0).to(tl.int32)
    top = tl.max((code & 0x7F).to(tl.int32), axis=1)
    not_finite = tl.max(((top == 0x7F) | (exponent == 255)).to(tl.int32), axis=0)
    # The scale of a block of zeros has no say.
    row_exponent = tl.max(tl.where(top == 0, -1, exponent), axis=0)
    row_exponent = tl.where(row_exponent < 0, 127, row_exponent)
    # Shifted by 2^-126 or less, every element rounds to zero: no smaller factor is needed.
    shift = tl.maximum(tl.minimum(exponent - row_exponent, 0), -126)
    exact = from_e4m3(code) * power_of_two(shift + 127)[:, None]
    folded = to_e4m3(exact, native)
    # Only subnormals change: to a multiple of 2^-9, which is the last bit of 2^14 in fp32. Decoding `folded` would say the
    # same, but for sm_90a ptxas miscompiles (triton 3.6) or crashes (3.8) where bytes that a conversion made are used.
    magnitude = tl.abs(exact)
    change = tl.where(magnitude < 0.015625, tl.abs(((magnitude + 16384.0) - 16384.0) - magnitude), 0.0)
    tl.store(folded_ptr + row * k_padded + offs_k, folded, mask=offs_k < k_padded)
    tl.store(row_scale_ptr + row, row_exponent.to(tl.uint8))
    tl.store(statistics_ptr + row * 4, tl.sum(tl.sum(change * change, axis=1), axis=0))
    tl.store(statistics_ptr + row * 4 + 1, tl.sum(tl.sum(exact * exact, axis=1), axis=0))
    tl.store(statistics_ptr + row * 4 + 2, tl.max(tl.max(change, axis=1), axis=0))
    tl.store(statistics_ptr + row * 4 + 3, not_finite.to(tl.float32))


@kernel()
def dequantize_kernel(
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    k_size: tl.tensor,
    num_blocks: tl.tensor,
    blocks: tl.constexpr,
) -> None:
    """`blocks` blocks of a row: w[n, k] = value of data[n, k] * 2^(scale[n, k // 32] - 127), in w's dtype."""
    first = tl.program_id(0).to(tl.int64) * blocks
    row = tl.program_id(1).to(tl.int64)
    offs_g = tl.arange(0, blocks)
    offs_k = offs_g[:, None] * 32 + tl.arange(0, 32)[None, :]
    start = row * k_size + first * 32
    valid = offs_k < k_size - first * 32
    scales = scale_ptr + row * num_blocks + first + offs_g
    exponent = tl.load(scales, mask=offs_g < num_blocks - first, other=127).to(tl.int32)
    values = from_e4m3(tl.load(data_ptr + start + offs_k, mask=valid, other=0))
    values *= power_of_two(exponent)[:, None]
    tl.store(w_ptr + start + offs_k, values.to(w_ptr.dtype.element_ty), mask=valid)


def quantize_tokens(x: Tensor, *, native: bool, overlap: bool) -> tuple[Tensor, Tensor]:
    """FP8 activations `float8_e4m3fn [M, K']` and their scales `float32 [M]`, from x `[M, K]` with K contiguous.

    Args:
        native: whether the GPU rounds to E4M3 itself (compute capability 8.9 and up).
        overlap: whether the launch may begin before the kernel ahead of it ends (9.0 and up).
    """
    m_size, k_size = x.shape
    k_padded = _aligned(k_size)
    a = torch.empty((m_size, k_padded), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(m_size, dtype=torch.float32, device=x.device)
    block = min(8192, 1 << (k_padded - 1).bit_length())
    quantize_tokens_kernel[(m_size,)](
        x,
        a.view(torch.uint8),
        scale,
        k_size,
        k_padded,
        x.stride(0),
        block=block,
        one_pass=block >= k_padded,
        overlap=overlap,
        native=native,
        num_warps=min(8, max(1, block // 512)),
        **launch_options(overlap=overlap),
    )
    return a, scale


def quantize_tokens_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_tokens` computes, in plain torch."""
    wide = torch.nn.functional.pad(x.float(), (0, _aligned(x.shape[1]) - x.shape[1]))
    scale = (wide.abs().amax(dim=1) * (1.0 / E4M3_MAX)).clamp(min=_TINY)
    return (wide * (1.0 / scale).unsqueeze(1)).to(torch.float8_e4m3fn), scale


def quantize_mxfp8(w: Tensor, rule: ScaleRule = ScaleRule.CEIL, *, native: bool, out: MXTensor | None = None) -> MXTensor:
    """`quant.mxfp8.quantize` for a tensor on a GPU: arguments, result and errors are the same.

    Raises:
        ValueError: as `quant.mxfp8.quantize`.
    """
    if out is None:
        out = mxfp8.empty(tuple(w.shape), lambda shape, dtype: torch.empty(shape, dtype=dtype, device=w.device))
    whole = w.is_contiguous() and out.data.is_contiguous() and out.scale.is_contiguous()
    if w.dtype not in (torch.float32, torch.bfloat16, torch.float16) or out.shape != w.shape or not whole or not w.numel():
        return mxfp8.quantize(w, rule, out=out)
    # Where no block crosses a row, the rows are one.
    k_size = w.numel() if w.shape[-1] % mxfp8.BLOCK_SIZE == 0 else w.shape[-1]
    num_blocks = mxfp8.num_blocks(k_size)
    not_finite = torch.zeros(1, dtype=torch.int32, device=w.device)
    blocks = 128
    quantize_mxfp8_kernel[(-(-num_blocks // blocks), w.numel() // k_size)](
        w,
        out.data.view(torch.uint8),
        out.scale,
        not_finite,
        k_size,
        num_blocks,
        ceil_rule=rule is ScaleRule.CEIL,
        blocks=blocks,
        native=native,
        num_warps=4,
        **launch_options(),
    )
    if int(not_finite):
        return mxfp8.quantize(w, rule, out=out)  # which raises, naming the element
    return out


def fold_mxfp8(mx: MXTensor, *, native: bool) -> FoldedTensor:
    """`quant.mxfp8.fold` for a matrix `[N, K]` on a GPU; rows of the result are padded with zeros to `[N, K']`.

    Raises:
        ValueError: an element or a scale of `mx` is NaN.
    """
    n_size, k_size = mx.shape
    k_padded = _aligned(k_size)
    folded = torch.empty((n_size, k_padded), dtype=torch.float8_e4m3fn, device=mx.data.device)
    row_scale = torch.empty(n_size, dtype=torch.uint8, device=mx.data.device)
    statistics = torch.empty((n_size, 4), dtype=torch.float32, device=mx.data.device)
    blocks = 1 << (mxfp8.num_blocks(k_padded) - 1).bit_length()  # a row stays in registers
    fold_kernel[(n_size,)](
        mx.data.view(torch.uint8),
        mx.scale,
        folded.view(torch.uint8),
        row_scale,
        statistics,
        k_size,
        k_padded,
        mxfp8.num_blocks(k_size),
        blocks=blocks,
        native=native,
        num_warps=max(1, min(16, blocks // 32)),
        **launch_options(),
    )
    changed, total, worst, not_finite = statistics.double().unbind(dim=1)  # each [N]
    weight = torch.exp2(2.0 * (row_scale.double() - mxfp8.SCALE_BIAS))
    sums = torch.stack(((changed * weight).sum(), (total * weight).sum(), worst.max(), not_finite.max())).tolist()
    if sums[3]:
        raise ValueError("fold takes finite values, got NaN among the elements or scales")
    return FoldedTensor(folded, row_scale, (sums[0] / sums[1]) ** 0.5 if sums[0] else 0.0, sums[2])


def dequantize_mxfp8(mx: MXTensor, dtype: torch.dtype) -> Tensor:
    """`quant.mxfp8.dequantize` for a contiguous MXTensor without NaN on a GPU."""
    out = torch.empty(mx.shape, dtype=dtype, device=mx.data.device)
    k_size = out.numel() if mx.shape[-1] % mxfp8.BLOCK_SIZE == 0 else mx.shape[-1]
    num_blocks, blocks = mxfp8.num_blocks(k_size), 128
    dequantize_kernel[(-(-num_blocks // blocks), out.numel() // k_size)](
        mx.data.view(torch.uint8), mx.scale, out, k_size, num_blocks, blocks=blocks, num_warps=4, **launch_options()
    )
    return out


def _aligned(k_size: int) -> int:
    return -(-k_size // ROW_ALIGNMENT) * ROW_ALIGNMENT
