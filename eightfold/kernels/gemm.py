"""Dense products on a GPU: FP8 x FP8 on folded weights, and exact MXFP8 weights against bf16 activations.

What is computed. y = x Wᵀ + b for x `[M, K]` and W `[N, K]`. A folded weight is E4M3 with a power of two for each row, and
activations are E4M3 with a scale for each token, so that

    y[m, n] = row_scale[n] * token_scale[m] * sum over k of f[n, k] * a[m, k] + bias[n]

The scales are applied once, after the sum; nothing of them is left inside the loop.

Layout. W stays as the checkpoint has it, `[N, K]` with K contiguous, which is what FP8 tensor cores want of both operands; rows
are padded to 16 bytes for the copy engine. A tile of W is the *left* operand and tokens are the right one: the left side of
a Hopper instruction has 64 rows, the right side may have as few as 8, and in decoding it is tokens that are few.

What bounds it. With few tokens, reading W once: 64 rows of W a program, and enough stages in flight to keep the memory busy
from one program on each multiprocessor. From about 64 tokens on, in narrow layers, the path from L2 into a multiprocessor,
since every tile of W reads all its tokens. From some hundred tokens on, the tensor cores.

Overlap. A product of 4096 x 4096 takes 4 µs to read, and a launch, a first load and a drain cost as much. On Hopper a launch
may begin before its predecessor ends. Each program then asks for the first part of its rows of W, which no kernel writes, into
the L2 cache, and only after that waits for the activations. Kernels that take part all wait before they read or write anything
that another kernel touches, so results have the order of the stream.

K is not split among programs. It was tried with partial sums added in a fixed order: writing, signalling and reading them back
cost more than the idle multiprocessors did, at every shape measured. Each output is therefore one program's sum over K in
order, and equal inputs give equal bits.

Accumulation. Hopper's FP8 tensor cores add in about 14 bits of mantissa. Moving partial sums into fp32 registers every 128
elements (`max_imprecise`) costs 5 to 70 % of the time; docs/backends.md has the error with and without. Without it the error
grows with K, to a tenth of what the quantization of the activations adds at K = 8192 and a sixth at 28672, so it is off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.jit import TensorDescriptor, kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.quantize import from_e4m3, power_of_two
from eightfold.kernels.tuning import TileConfig
from eightfold.quant.mxfp8 import BLOCK_SIZE, MXTensor


@dataclass(frozen=True, slots=True)
class FoldedWeight:
    """A folded weight as `fold_gemm` wants it.

    Attributes:
        data: `float8_e4m3fn [N, K']`, K padded with zeros to K', a multiple of 16.
        row_scale: `float32 [N]`, powers of two.
        bias: `[N]` in the activation dtype, or None.
    """

    data: Tensor
    row_scale: Tensor
    bias: Tensor | None


@kernel()
def prefetch_rows(
    w_ptr: tl.tensor, first_row: tl.tensor, n_size: tl.tensor, k_size: tl.tensor, rows: tl.constexpr, columns: tl.constexpr
) -> None:
    """Ask for the first `columns` bytes of `rows` rows of a byte matrix into L2, one request a line of 128 bytes."""
    # Beyond an edge the last line is asked for again, which costs nothing.
    row = tl.minimum(first_row + tl.arange(0, rows), n_size - 1).to(tl.int64)[:, None]
    column = tl.minimum(tl.arange(0, columns // 128) * 128, k_size - 1)[None, :]
    address = (w_ptr + row * k_size + column).to(tl.uint64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@kernel("m_size")
def fold_gemm_kernel(
    a_desc: tl.tensor,
    token_scale_ptr: tl.tensor,
    w_desc: tl.tensor,
    w_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    m_size: tl.tensor,
    n_size: tl.tensor,
    k_size: tl.tensor,
    has_bias: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    max_imprecise: tl.constexpr,
    prefetch: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One tile `[block_n, block_m]` of yᵀ, where y[m, n] = row_scale[n] * token_scale[m] * sum_k w[n, k] a[m, k] + bias[n].

    Shapes: a `float8_e4m3fn [M, K]`, w `float8_e4m3fn [N, K]`, w_ptr the bytes of w, token_scale `float32 [M]`, row_scale
    `float32 [N]`, bias `[N]` and y `[M, N]` in any float dtype. K is a multiple of 16. The fold is that of `quant/mxfp8.py`.
    """
    # Tiles of the same rows of W are neighbours in the launch, so that W comes from memory once.
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    if overlap:
        if prefetch > 0:
            prefetch_rows(w_ptr, tile_n * block_n, n_size, k_size, block_n, prefetch)
        launch_dependents()
        wait_for_predecessor()
    acc = tl.zeros((block_n, block_m), dtype=tl.float32)
    for k in range(0, k_size, block_k):
        w = w_desc.load([tile_n * block_n, k])
        a = a_desc.load([tile_m * block_m, k])
        acc = tl.dot(w, a.trans(1, 0), acc, max_num_imprecise_acc=max_imprecise)
    offs_n = tile_n * block_n + tl.arange(0, block_n)
    offs_m = tile_m * block_m + tl.arange(0, block_m)
    n_valid = offs_n < n_size
    m_valid = offs_m < m_size
    acc *= tl.load(token_scale_ptr + offs_m, mask=m_valid, other=0.0)[None, :]
    acc *= tl.load(row_scale_ptr + offs_n, mask=n_valid, other=0.0)[:, None]
    if has_bias:
        acc += tl.load(bias_ptr + offs_n, mask=n_valid, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[None, :] * n_size + offs_n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_valid[:, None] & m_valid[None, :])


@kernel("m_size")
def dequant_gemm_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    m_size: tl.tensor,
    n_size: tl.tensor,
    k_size: tl.tensor,
    num_blocks: tl.tensor,
    stride_x: tl.tensor,
    has_bias: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """One tile `[block_n, block_m]` of yᵀ, where y[m, n] = sum_k w[n, k] 2^(scale[n, k // 32] - 127) x[m, k] + bias[n].

    Shapes: x `bfloat16 [M, K]`, w `uint8 [N, K]` (the bytes of E4M3), scale `uint8 [N, num_blocks]`, bias `[N]`, y `[M, N]`. A
    tile of W is widened in registers, where the left operand of a Hopper instruction may lie; an E4M3 number times a power of
    two is exact in bf16.
    """
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    offs_n = tile_n * block_n + tl.arange(0, block_n)
    offs_m = tile_m * block_m + tl.arange(0, block_m)
    n_valid = offs_n < n_size
    m_valid = offs_m < m_size
    w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * k_size
    scale_rows = scale_ptr + offs_n.to(tl.int64)[:, None] * num_blocks
    x_rows = x_ptr + offs_m.to(tl.int64)[:, None] * stride_x
    acc = tl.zeros((block_n, block_m), dtype=tl.float32)
    for k in range(0, k_size, block_k):
        offs_k = k + tl.arange(0, block_k)
        offs_g = k // 32 + tl.arange(0, block_k // 32)
        k_valid = offs_k < k_size
        w = tl.load(w_rows + offs_k[None, :], mask=n_valid[:, None] & k_valid[None, :], other=0)
        x = tl.load(x_rows + offs_k[None, :], mask=m_valid[:, None] & k_valid[None, :], other=0.0)
        # 127 is a scale of one, for the blocks past the edge.
        scale = tl.load(scale_rows + offs_g[None, :], mask=n_valid[:, None] & (offs_g < num_blocks)[None, :], other=127)
        blocks = tl.reshape(from_e4m3(w), (block_n, block_k // 32, 32)) * power_of_two(scale.to(tl.int32))[:, :, None]
        acc = tl.dot(tl.reshape(blocks, (block_n, block_k)).to(x.dtype), x.trans(1, 0), acc)
    if has_bias:
        acc += tl.load(bias_ptr + offs_n, mask=n_valid, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[None, :] * n_size + offs_n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_valid[:, None] & m_valid[None, :])


def fold_gemm(
    a: Tensor,
    token_scale: Tensor,
    weight: FoldedWeight,
    config: TileConfig,
    dtype: torch.dtype,
    *,
    overlap: bool,
    max_imprecise: int | None = None,
) -> Tensor:
    """y `[M, N]` in `dtype` from quantized activations and a folded weight.

    Args:
        a: `float8_e4m3fn [M, K']`, from `quantize_tokens`.
        token_scale: `float32 [M]`.
        weight: the folded weight `[N, K']`.
        config: how the product is cut into programs.
        dtype: of y.
        overlap: whether the launch may begin before the kernel ahead of it ends (compute capability 9.0 and up).
        max_imprecise: elements along K that the tensor core may sum before fp32 takes over; None leaves all to it.
    """
    m_size = a.shape[0]
    n_size, k_size = weight.data.shape
    y = torch.empty((m_size, n_size), dtype=dtype, device=a.device)
    prefetch = min(config.prefetch, 1 << (k_size - 1).bit_length())
    fold_gemm_kernel[(-(-m_size // config.block_m), -(-n_size // config.block_n))](
        TensorDescriptor.from_tensor(a, [config.block_m, config.block_k]),
        token_scale,
        TensorDescriptor.from_tensor(weight.data, [config.block_n, config.block_k]),
        weight.data.view(torch.uint8),
        weight.row_scale,
        weight.row_scale if weight.bias is None else weight.bias,
        y,
        m_size,
        n_size,
        k_size,
        has_bias=weight.bias is not None,
        block_n=config.block_n,
        block_m=config.block_m,
        block_k=config.block_k,
        max_imprecise=max_imprecise,
        prefetch=prefetch if prefetch >= 128 else 0,
        overlap=overlap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(overlap=overlap),
    )
    return y


def library_gemm(a: Tensor, token_scale: Tensor, weight: FoldedWeight) -> Tensor:
    """`fold_gemm` in bf16 by torch's rowwise-scaled FP8 product; N and K' are multiples of 16."""
    return torch._scaled_mm(
        a,
        weight.data.t(),
        scale_a=token_scale.unsqueeze(1),
        scale_b=weight.row_scale.unsqueeze(0),
        bias=weight.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def dequant_gemm(x: Tensor, weight: MXTensor, bias: Tensor | None) -> Tensor:
    """y `[M, N]` in bf16 from x `bfloat16 [M, K]` and a weight `[N, K]` in MXFP8 as it is; for up to some dozen tokens."""
    m_size, k_size = x.shape
    n_size = weight.shape[0]
    y = torch.empty((m_size, n_size), dtype=x.dtype, device=x.device)
    block_n, block_m = 64, 16 if m_size <= 16 else 32 if m_size <= 32 else 64
    dequant_gemm_kernel[(-(-m_size // block_m), -(-n_size // block_n))](
        x,
        weight.data.view(torch.uint8),
        weight.scale,
        weight.scale if bias is None else bias,
        y,
        m_size,
        n_size,
        k_size,
        -(-k_size // BLOCK_SIZE),
        x.stride(0),
        has_bias=bias is not None,
        block_n=block_n,
        block_m=block_m,
        block_k=128,
        num_warps=4,
        num_stages=4,
        **launch_options(),
    )
    return y
