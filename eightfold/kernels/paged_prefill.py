"""Prefill over the paged KV cache on a GPU: chunks of several tokens. What attention is, `paged_attention.py` says.

A program has `block_m` rows, which are (query, head of the group) pairs of neighbouring queries, and walks the keys that they
see; only steps that some of them see in part are masked. Programs are dealt to sequences on the device, those with most keys
first, and the ones that are left over end at once. What bounds it is the tensor cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.operations import AttentionMetadata, AttentionSpec
from eightfold.kernels.paged_attention import attend_keys, padded_width, power_of_two


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """How prefill is cut.

    Attributes:
        block_m: rows of a program, each a query with a head.
        block_n: keys in one step.
        num_stages: steps whose loads are in flight.
        num_warps: warps of a program.
        max_registers: of a thread; None leaves it to the compiler.
    """

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    max_registers: int | None = None


def choose_prefill_tile(spec: AttentionSpec, max_query_len: int, shared_bytes: int) -> PrefillTile:
    """As many rows as registers hold, but no more than the longest chunk has."""
    group = spec.num_heads // spec.num_kv_heads
    row = padded_width(spec.head_dim) * spec.activation_dtype.itemsize
    rows = max(16, power_of_two(group), min(128, power_of_two(max_query_len * group)))
    if spec.activation_dtype == torch.float32:
        return PrefillTile(max(power_of_two(group), min(rows, 32)), 32 if row <= 512 else 16, 2, 4)
    if shared_bytes < 160 << 10:
        return PrefillTile(max(power_of_two(group), min(rows, 64)), 32 if row <= 256 else 16, 2, 4)
    return PrefillTile(rows, 64, 3 if row <= 256 else 2, 8 if rows == 128 else 4)


@kernel()
def place_rows(
    row: tl.tensor,
    first_query: tl.tensor,
    query_len: tl.tensor,
    kv_head: tl.tensor,
    group: tl.constexpr,
    queries: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The query of each row `[rows]`, where its values lie within a token `[rows, width]`, and which of them there are."""
    query = first_query + row // group
    offs_d = tl.arange(0, width)
    is_row = (row < queries * group) & (query < query_len)
    within = (kv_head * group + row % group)[:, None] * head_dim + offs_d[None, :]
    return query, within, is_row[:, None] & (offs_d < head_dim)[None, :]


@kernel("num_seqs", "table_stride")
def prefill_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    q_stride: tl.tensor,
    scale: tl.tensor,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    seqs: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Some neighbouring queries of one sequence with the heads of one kv head; chunks of one token are left to decoding.

    Shapes: q `[T, H, D]` with tokens `q_stride` apart, k and v `[num_blocks, block_size, num_kv_heads, D]`, out `[T, H, D]`.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    kv_head = tl.program_id(0)
    index = tl.program_id(1)
    queries: tl.constexpr = block_m // group
    ids = tl.arange(0, seqs)
    starts = tl.load(query_start_ptr + ids, mask=ids < num_seqs, other=0)
    lengths = tl.load(query_start_ptr + 1 + ids, mask=ids < num_seqs, other=0) - starts
    blocks = tl.where(lengths > 1, (lengths + queries - 1) // queries, 0)
    seq = tl.sum((tl.cumsum(blocks, axis=0) <= index).to(tl.int32), axis=0)
    if seq >= num_seqs:
        return
    index -= tl.sum(tl.where(ids < seq, blocks, 0), axis=0)
    token = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - token
    cached = tl.load(context_lens_ptr + seq) - query_len
    first_query = ((query_len + queries - 1) // queries - 1 - index) * queries

    row = tl.arange(0, block_m)
    query, within, valid = place_rows(row, first_query, query_len, kv_head, group, queries, head_dim, width)
    position = cached + query
    q_rows = q_ptr + (token + query).to(tl.int64)[:, None] * q_stride
    q = tl.load(q_rows + within, mask=valid, other=0.0)
    acc = tl.zeros((block_m, width), dtype=tl.float32)
    total = tl.zeros((block_m,), dtype=tl.float32)
    highest = tl.full((block_m,), -1e30, dtype=tl.float32)

    # Keys that some query sees are begin : end, and those that all see are all_begin : all_end, in whole steps from begin on.
    lowest = cached + first_query
    end = cached + tl.minimum(first_query + queries, query_len)
    begin = 0
    all_begin = 0
    if window > 0:
        begin = tl.maximum(lowest - window + 1, 0) // block_n * block_n
        all_begin = (tl.maximum(end - window, 0) + block_n - 1) // block_n * block_n
    all_end = tl.maximum((lowest + 1) // block_n * block_n, begin)
    all_begin = tl.minimum(all_begin, all_end)
    k_head = k_ptr + kv_head * head_dim
    v_head = v_ptr + kv_head * head_dim
    table = table_ptr + seq.to(tl.int64) * table_stride
    stride: tl.constexpr = num_kv_heads * head_dim
    # fmt: off
    if window > 0:
        acc, total, highest = attend_keys(
            q, acc, total, highest, k_head, v_head, table, position, begin, all_begin, scale,
            stride, head_dim, width, block_size, block_n, window, False, True,
        )
    acc, total, highest = attend_keys(
        q, acc, total, highest, k_head, v_head, table, position, all_begin, all_end, scale,
        stride, head_dim, width, block_size, block_n, window, False, False,
    )
    acc, total, highest = attend_keys(
        q, acc, total, highest, k_head, v_head, table, position, all_end, end, scale,
        stride, head_dim, width, block_size, block_n, window, True, True,
    )
    # fmt: on
    total = tl.where(total > 0.0, total, 1.0)
    # query_start begins with 0, which the compiler does not know: else it would hold all addresses in registers from above.
    row = tl.arange(0, block_m) + tl.load(query_start_ptr, volatile=True)
    query, within, valid = place_rows(row, first_query, query_len, kv_head, group, queries, head_dim, width)
    out_rows = out_ptr + (token + query).to(tl.int64)[:, None] * (num_kv_heads * group * head_dim)
    tl.store(out_rows + within, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=valid)


def prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    tile: PrefillTile,
    *,
    overlap: bool,
) -> None:
    """Write the rows of `out` whose chunk is longer than one token; arguments as in `paged_attention.decode`."""
    num_seqs, group = metadata.context_lens.shape[0], spec.num_heads // spec.num_kv_heads
    num_tokens = query.shape[0]
    # A chunk of q tokens needs at most q / queries + 1 programs, and chunks of two tokens or more are at most so many.
    blocks = num_tokens // (tile.block_m // group) + min(num_seqs, num_tokens // 2)
    prefill_kernel[(spec.num_kv_heads, blocks)](
        query,
        key_cache,
        value_cache,
        out,
        metadata.block_tables,
        metadata.query_start,
        metadata.context_lens,
        num_seqs,
        metadata.block_tables.stride(0),
        query.stride(0),
        spec.scale * math.log2(math.e),
        num_kv_heads=spec.num_kv_heads,
        group=group,
        head_dim=spec.head_dim,
        width=padded_width(spec.head_dim),
        block_size=key_cache.shape[1],
        window=spec.sliding_window or 0,
        seqs=power_of_two(num_seqs),
        block_m=tile.block_m,
        block_n=tile.block_n,
        overlap=overlap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.max_registers,
        **launch_options(overlap=overlap),
    )
