"""Dense products on tensor cores that apply the scales of MXFP8 themselves: compute capability 10.0, 10.3, 12.0, 12.1, gfx950.

What is computed. y = x Wᵀ + b for W `[N, K]` in MXFP8 as the checkpoint has it and x `[M, K]` in MXFP8 quantized per token and
32, so that, with g = k // 32,

    y[m, n] = sum over k of w[n, k] 2^(ws[n, g] - 127) a[m, k] 2^(as[m, g] - 127) + bias[n]

in one instruction for each tile of k: nothing is folded or widened, and the result is exact but for accumulation in fp32.

Layout. W and its scales stay row by row. A tile of W is the left operand for every number of tokens: the block-scaled
instruction of compute capability 10.0 has 128 rows on its left, and with fewer triton multiplies in bf16 without a word; its
right side may be as narrow as 16, and in decoding it is tokens that are few.

What bounds it. With few tokens, reading W once; from some hundred tokens on, the tensor cores. It has not been run on such a
GPU yet: it is compiled for them, and interpreted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.quantize_rows import BlockQuantized
from eightfold.kernels.scale_layouts import ScaleLayout
from eightfold.quant.mxfp8 import MXTensor, num_blocks

# Rows of the instruction's left operand: narrower tiles fall back to bf16.
BLOCK_N = 128
BLOCK_K = 128


@kernel("m_size")
def native_gemm_kernel(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    m_size: tl.tensor,
    n_size: tl.tensor,
    k_size: tl.tensor,
    num_blocks: tl.tensor,
    stride_a: tl.tensor,
    has_bias: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One tile `[block_n, block_m]` of yᵀ, where y[m, n] = sum_k w[n, k] 2^(ws - 127) a[m, k] 2^(as - 127) + bias[n].

    Shapes: a `float8_e4m3fn [M, K]` with rows `stride_a` apart, its scales `uint8 [M, num_blocks]`, w `float8_e4m3fn [N, K]`,
    its scales `uint8 [N, num_blocks]`, bias `[N]`, y `[M, N]`. The format is OCP Microscaling v1.0.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    offs_n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    offs_m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n_valid, m_valid = offs_n < n_size, offs_m < m_size
    w_rows = w_ptr + offs_n.to(tl.int64)[:, None] * k_size
    a_rows = a_ptr + offs_m.to(tl.int64)[None, :] * stride_a
    w_scales = w_scale_ptr + offs_n.to(tl.int64)[:, None] * num_blocks
    a_scales = a_scale_ptr + offs_m.to(tl.int64)[:, None] * num_blocks
    acc = tl.zeros((block_n, block_m), dtype=tl.float32)
    for k in range(0, k_size, block_k):
        offs_k = k + tl.arange(0, block_k)
        offs_g = k // 32 + tl.arange(0, block_k // 32)
        k_valid, g_valid = offs_k < k_size, (offs_g < num_blocks)[None, :]
        w = tl.load(w_rows + offs_k[None, :], mask=n_valid[:, None] & k_valid[None, :], other=0.0)
        a = tl.load(a_rows + offs_k[:, None], mask=k_valid[:, None] & m_valid[None, :], other=0.0)
        # 127 is a scale of one, for what lies past the edges.
        w_scale = tl.load(w_scales + offs_g[None, :], mask=n_valid[:, None] & g_valid, other=127)
        a_scale = tl.load(a_scales + offs_g[None, :], mask=m_valid[:, None] & g_valid, other=127)
        acc = tl.dot_scaled(w, w_scale, "e4m3", a, a_scale, "e4m3", acc)
    if has_bias:
        acc += tl.load(bias_ptr + offs_n, mask=n_valid, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[None, :] * n_size + offs_n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_valid[:, None] & m_valid[None, :])


def choose_block_m(num_tokens: int) -> int:
    """Tokens of a tile: as few as hold them all, from 16 to 128."""
    return min(128, max(16, 1 << (num_tokens - 1).bit_length()))


def native_gemm(a: BlockQuantized, weight: MXTensor, bias: Tensor | None, dtype: torch.dtype, *, overlap: bool) -> Tensor:
    """y `[M, N]` in `dtype`, from tokens with linear scales and a contiguous weight `[N, K]`.

    Args:
        overlap: whether the launch may begin before the kernel ahead of it ends (NVIDIA, compute capability 9.0 and up).

    Raises:
        ValueError: scales of the tokens lie in another order than row by row.
    """
    scales = a.scales.need(ScaleLayout.LINEAR)
    m_size, (n_size, k_size) = a.data.shape[0], weight.shape
    y = torch.empty((m_size, n_size), dtype=dtype, device=a.data.device)
    block_m = choose_block_m(m_size)
    native_gemm_kernel[(-(-m_size // block_m), -(-n_size // BLOCK_N))](
        a.data,
        scales,
        weight.data,
        weight.scale,
        weight.scale if bias is None else bias,
        y,
        m_size,
        n_size,
        k_size,
        num_blocks(k_size),
        a.data.stride(0),
        has_bias=bias is not None,
        block_n=BLOCK_N,
        block_m=block_m,
        block_k=BLOCK_K,
        overlap=overlap,
        num_warps=4,
        num_stages=3,
        **launch_options(overlap=overlap),
    )
    return y
