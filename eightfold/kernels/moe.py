"""Experts on a GPU: grouped FP8 products on folded weights.

What is computed. Each token has `top_k` experts; a *pair* is a token with one of them, numbered token * top_k + choice. Three
steps with a quantization before each product:

    h[pair] = act(W13[expert] a[token])            act(gate) * up where experts are gated
    z[pair] = weight[pair] * W2[expert] a'[pair]   a' is h in FP8 with a scale a pair
    y[token] = sum over its pairs, in order        in fp32

Sorting. One program counts the pairs of each expert, gives each expert whole blocks of `block_m` places, and deals the pairs
into them; the places that are left hold the number of pairs, which is none. It never asks the host. The order of pairs within
an expert is that of arrival at a counter and may differ from run to run; since every pair is a column of its own in a
product, and sums run over choices, results do not.

Products. As in `gemm.py` a tile of W is the left operand. Rows of a block are gathered by pair, so neither product needs a
sorted copy of its input, and an expert that no token chose is not read. A program whose block is past the last one ends at
once.

What bounds it. With few tokens, the weights of the experts that are touched, read once. With many, the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.jit import TensorDescriptor, kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.operations import Activation


@dataclass(frozen=True, slots=True)
class FoldedExperts:
    """One folded projection of all experts.

    Attributes:
        data: `float8_e4m3fn [E * R, K']`, K padded with zeros to K', a multiple of 16.
        row_scale: `float32 [E * R]`, powers of two.
        num_experts: E.
    """

    data: Tensor
    row_scale: Tensor
    num_experts: int

    @property
    def rows(self) -> int:
        """R, rows of one expert."""
        return self.data.shape[0] // self.num_experts


@dataclass(frozen=True, slots=True)
class MoeTile:
    """How the products are cut into programs.

    Attributes:
        block_m: pairs in a block.
        block_n: rows of W in a tile; with a gate, so many of gate and of up.
        block_k: elements along K in one step.
        num_stages: steps whose loads are in flight.
        num_warps: warps of a program.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs by expert.

    Attributes:
        places: `int32 [max_blocks * block_m]`, pairs; their number stands for none.
        block_expert: `int32 [max_blocks]`.
        num_blocks: `int32 [1]`, blocks in use.
        num_pairs: pairs in all.
    """

    places: Tensor
    block_expert: Tensor
    num_blocks: Tensor
    num_pairs: int


def choose_tile(num_pairs: int, num_experts: int, *, gated: bool) -> MoeTile:
    """By the pairs of an expert, were they spread evenly: tiles are no taller than needed, since each reads its rows of W."""
    each = num_pairs / num_experts
    if each <= 12:
        return MoeTile(16, 64, 256, 3 if gated else 4, 4)
    if each <= 24:
        return MoeTile(32, 64, 256, 3, 4)
    if each <= 64:
        return MoeTile(64, 64 if gated else 128, 128, 4, 4)
    return MoeTile(128, 64 if gated else 128, 128, 4, 8)


@kernel("num_pairs")
def sort_pairs_kernel(
    ids_ptr: tl.tensor,
    places_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    num_blocks_ptr: tl.tensor,
    cursor_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.constexpr,
    experts: tl.constexpr,
    block_m: tl.constexpr,
    step: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One program: places by expert, in whole blocks.

    Shapes: ids `int64 [num_pairs]`, places `int32`, block_expert `int32`, num_blocks `int32 [1]`, cursor `int32 [num_experts]`.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    expert = tl.arange(0, experts)
    is_expert = expert < num_experts
    tl.store(cursor_ptr + expert, 0, mask=is_expert)
    tl.debug_barrier()
    for start in range(0, num_pairs, step):
        pair = start + tl.arange(0, step)
        chosen = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0)
        tl.atomic_add(cursor_ptr + chosen, 1, mask=pair < num_pairs)
    tl.debug_barrier()
    count = tl.atomic_add(cursor_ptr + expert, 0, mask=is_expert)
    count = tl.where(is_expert, count, 0)
    blocks = (count + block_m - 1) // block_m
    end = tl.cumsum(blocks, axis=0)
    first = end - blocks
    tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for block in range(tl.max(blocks, axis=0)):
        tl.store(block_expert_ptr + first + block, expert, mask=block < blocks)
    for free in range(block_m):
        place = first * block_m + count + free
        tl.store(places_ptr + place, tl.zeros_like(place) + num_pairs, mask=place < end * block_m)
    tl.debug_barrier()
    tl.atomic_xchg(cursor_ptr + expert, first * block_m, mask=is_expert)
    tl.debug_barrier()
    for start in range(0, num_pairs, step):
        pair = start + tl.arange(0, step)
        chosen = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=0)
        place = tl.atomic_add(cursor_ptr + chosen, 1, mask=pair < num_pairs)
        tl.store(places_ptr + place, pair, mask=pair < num_pairs)


@kernel("num_pairs")
def moe_gemm_kernel(
    a_ptr: tl.tensor,
    a_scale_ptr: tl.tensor,
    w_desc: tl.tensor,
    row_scale_ptr: tl.tensor,
    pair_weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    places_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    num_blocks_ptr: tl.tensor,
    num_pairs: tl.tensor,
    n_size: tl.tensor,
    k_size: tl.tensor,
    pairs_per_row: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    weighted: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One tile `[block_n, block_m]` of yᵀ for the pairs of one block, all of one expert.

    y[p, n] = act(row_scale[e, n] * a_scale[r] * sum_k w[e, n, k] a[r, k]) * pair_weight[p], with r = p / pairs_per_row.

    Shapes: a `float8_e4m3fn [rows, K']`, a_scale `float32 [rows]`, w `float8_e4m3fn [E * R, K']` with R = n_size, or twice that
    where gates come before ups, row_scale `float32 [E * R]`, pair_weight `float32 [num_pairs]`, y `[num_pairs, n_size]`.
    """
    tile_n = tl.program_id(0)
    block = tl.program_id(1)
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    if block >= tl.load(num_blocks_ptr):
        return
    expert = tl.load(block_expert_ptr + block)
    rows = expert * (2 * n_size if gated else n_size)
    pair = tl.load(places_ptr + block * block_m + tl.arange(0, block_m))
    m_valid = pair < num_pairs
    row = (pair // pairs_per_row).to(tl.int64)
    offs_k = tl.arange(0, block_k)
    a_rows = a_ptr + row[:, None] * k_size + offs_k[None, :]
    acc = tl.zeros((block_n, block_m), dtype=tl.float32)
    up = tl.zeros((block_n, block_m), dtype=tl.float32)
    for k in range(0, k_size, block_k):
        a = tl.load(a_rows + k, mask=m_valid[:, None] & (offs_k < k_size - k)[None, :], other=0.0).trans(1, 0)
        acc = tl.dot(w_desc.load([rows + tile_n * block_n, k]), a, acc)
        if gated:
            up = tl.dot(w_desc.load([rows + n_size + tile_n * block_n, k]), a, up)
    offs_n = tile_n * block_n + tl.arange(0, block_n)
    n_valid = offs_n < n_size
    token_scale = tl.load(a_scale_ptr + row, mask=m_valid, other=0.0)[None, :]
    acc *= token_scale * tl.load(row_scale_ptr + rows + offs_n, mask=n_valid, other=0.0)[:, None]
    if activation == "relu2":
        acc = tl.maximum(acc, 0.0)
        acc *= acc
    if activation == "silu":
        acc *= tl.sigmoid(acc)
    if gated:
        acc *= up * (token_scale * tl.load(row_scale_ptr + rows + n_size + offs_n, mask=n_valid, other=0.0)[:, None])
    if weighted:
        acc *= tl.load(pair_weight_ptr + pair, mask=m_valid, other=0.0)[None, :]
    y_ptrs = y_ptr + pair.to(tl.int64)[None, :] * n_size + offs_n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_valid[:, None] & m_valid[None, :])


@kernel()
def sum_choices_kernel(
    z_ptr: tl.tensor, y_ptr: tl.tensor, k_size: tl.tensor, top_k: tl.constexpr, block: tl.constexpr, overlap: tl.constexpr
) -> None:
    """Part of one token: y[t, k] = sum over j of z[t * top_k + j, k], in fp32 and in order.

    Shapes: z `[T * top_k, K]`, y `[T, K]`.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    token = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    valid = offsets < k_size
    total = tl.zeros((block,), dtype=tl.float32)
    for choice in range(top_k):
        total += tl.load(z_ptr + (token * top_k + choice) * k_size + offsets, mask=valid, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * k_size + offsets, total.to(y_ptr.dtype.element_ty), mask=valid)


def sort_pairs(expert_ids: Tensor, num_experts: int, block_m: int, *, overlap: bool) -> SortedPairs:
    """Pairs by expert, from ids `int64 [T, top_k]`."""
    num_pairs = expert_ids.numel()
    max_blocks = num_pairs // block_m + min(num_experts, num_pairs)
    device = expert_ids.device
    places = torch.empty(max_blocks * block_m, dtype=torch.int32, device=device)
    block_expert = torch.empty(max_blocks, dtype=torch.int32, device=device)
    scratch = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    sort_pairs_kernel[(1,)](
        expert_ids.contiguous(),
        places,
        block_expert,
        scratch[num_experts:],
        scratch,
        num_pairs,
        num_experts=num_experts,
        experts=1 << (num_experts - 1).bit_length(),
        block_m=block_m,
        step=min(4096, max(128, 1 << (num_pairs - 1).bit_length())),
        overlap=overlap,
        num_warps=4 if num_pairs <= 512 else 16,
        **launch_options(overlap=overlap),
    )
    return SortedPairs(places, block_expert, scratch[num_experts:], num_pairs)


def moe_gemm(
    a: Tensor,
    a_scale: Tensor,
    weight: FoldedExperts,
    pairs: SortedPairs,
    tile: MoeTile,
    dtype: torch.dtype,
    *,
    pairs_per_row: int,
    activation: Activation | None,
    gated: bool,
    pair_weight: Tensor | None,
    overlap: bool,
) -> Tensor:
    """`[num_pairs, n]` in `dtype`, n the rows of an expert, or half of them with a gate; the formula is the kernel's.

    Args:
        a: `float8_e4m3fn [num_pairs / pairs_per_row, K']`.
        a_scale: `float32`, one for each row of a.
        weight: the projection.
        pairs: who goes where.
        tile: how the product is cut.
        dtype: of the result.
        pairs_per_row: top_k for rows that are tokens, 1 for rows that are pairs.
        activation: what follows the product.
        gated: whether rows are gates before ups.
        pair_weight: `float32 [num_pairs]`, factors; or None.
        overlap: whether the launch may begin before the kernel ahead of it ends (compute capability 9.0 and up).
    """
    n_size, k_size = weight.rows // 2 if gated else weight.rows, weight.data.shape[1]
    y = torch.empty((pairs.num_pairs, n_size), dtype=dtype, device=a.device)
    moe_gemm_kernel[(-(-n_size // tile.block_n), pairs.block_expert.numel())](
        a,
        a_scale,
        TensorDescriptor.from_tensor(weight.data, [tile.block_n, tile.block_k]),
        weight.row_scale,
        a_scale if pair_weight is None else pair_weight,
        y,
        pairs.places,
        pairs.block_expert,
        pairs.num_blocks,
        pairs.num_pairs,
        n_size,
        k_size,
        pairs_per_row=pairs_per_row,
        activation=activation,
        gated=gated,
        weighted=pair_weight is not None,
        block_n=tile.block_n,
        block_m=tile.block_m,
        block_k=tile.block_k,
        overlap=overlap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(overlap=overlap),
    )
    return y


def sum_choices(z: Tensor, top_k: int, *, overlap: bool) -> Tensor:
    """`[T, K]` from `[T * top_k, K]`, summed in fp32."""
    num_tokens, k_size = z.shape[0] // top_k, z.shape[1]
    y = torch.empty((num_tokens, k_size), dtype=z.dtype, device=z.device)
    block = min(1024, 1 << (k_size - 1).bit_length())
    sum_choices_kernel[(-(-k_size // block), num_tokens)](
        z, y, k_size, top_k=top_k, block=block, overlap=overlap, num_warps=4, **launch_options(overlap=overlap)
    )
    return y
