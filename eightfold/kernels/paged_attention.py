"""Attention over the paged KV cache on a GPU: one pass over the keys, with the softmax's maximum and sum carried along.

For a query at position p, out = sum over keys j that it sees of softmax(scale * q k_j) v_j. Scores, maximum, sum and output are
in fp32, exponentials are of base 2, and probabilities are rounded to the dtype of V for the second product (FlashAttention-2,
arXiv 2307.08691). Keys are found row by row through the block table, so a step spans blocks of any size; block ids are read a
step ahead of the keys, and keys some steps ahead of their use. What is outside a context is never read.

There is a kernel for each of two kinds of chunks. It looks at the lengths on the device and leaves the other kind alone, so a
mixed batch is both launches. Prefill, of longer chunks, is in `paged_prefill.py`.

Decoding, of chunks of one token, is here. A program has one part of one sequence's context and all query heads of one kv head,
padded to the 16 rows of a matrix instruction: keys and values are read once, which is what bounds it. The host chooses the
largest number of parts; the device cuts each context into so many, or fewer where they would be short, and a second kernel adds
the parts (flash-decoding). A CUDA graph stays valid as contexts grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.operations import AttentionMetadata, AttentionSpec

# A part of a context is not cut shorter than this many tokens.
SHORTEST_PART = 128
MOST_PARTS = 128
# Programs for each multiprocessor that decoding is cut into: enough that the last ones to end leave little idle.
_PROGRAMS_PER_SM = 8


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How decoding is cut.

    Attributes:
        block_n: keys in one step.
        num_stages: steps whose loads are in flight.
        num_warps: warps of a program.
    """

    block_n: int
    num_stages: int
    num_warps: int


def choose_decode_tile(spec: AttentionSpec, shared_bytes: int) -> DecodeTile:
    """Three stages of keys and values, of which two programs fit into a multiprocessor with `shared_bytes` of shared memory."""
    row = padded_width(spec.head_dim) * spec.activation_dtype.itemsize
    stage = 16384 if shared_bytes >= 160 << 10 else 8192
    return DecodeTile(max(16, min(128, stage // row)), 3, 4)


def choose_parts(num_seqs: int, spec: AttentionSpec, max_context_len: int, num_sms: int) -> int:
    """The largest number of parts of a context: enough programs for `num_sms` multiprocessors, none shorter than it pays."""
    if spec.sliding_window is not None:
        max_context_len = min(max_context_len, spec.sliding_window)
    wanted = -(-_PROGRAMS_PER_SM * num_sms // (num_seqs * spec.num_kv_heads))
    return max(1, min(wanted, -(-max_context_len // SHORTEST_PART), MOST_PARTS))


@kernel()
def part_length(length: tl.tensor, parts: tl.tensor, shortest: tl.constexpr, block_n: tl.constexpr) -> tl.tensor:
    """Tokens of each part but the last of a context of `length` tokens that is cut into at most `parts`."""
    tokens = tl.maximum((length + parts - 1) // parts, shortest)
    return (tokens + block_n - 1) // block_n * block_n


@kernel()
def attend_keys(
    q: tl.tensor,
    acc: tl.tensor,
    total: tl.tensor,
    highest: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    stride: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
    window: tl.constexpr,
    bounded: tl.constexpr,
    causal: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the keys `begin : end` of one sequence and one kv head into the running output, sum and maximum of each row.

    Args:
        q: `[rows, width]`.
        acc: `float32 [rows, width]`, sum of exp2(score - highest) * v.
        total: `float32 [rows]`, sum of exp2(score - highest).
        highest: `float32 [rows]`.
        k_ptr: the kv head's first value in block 0; a slot is `stride` further than the one before it.
        v_ptr: like `k_ptr`.
        table_ptr: block table of the sequence.
        position: `int32 [rows]`, of the queries.
        begin: first key.
        end: behind the last key.
        scale: factor on the scores, log2(e) included.
        stride: elements of all kv heads of a token.
        head_dim: width of a head.
        width: that, padded to a power of two.
        block_size: tokens in a block.
        block_n: keys in one step.
        window: of the positions; 0 is none.
        bounded: whether the last step may reach beyond `end`.
        causal: whether some row does not see all keys.
    """
    offs_d = tl.arange(0, width)
    key = begin + tl.arange(0, block_n)
    block = tl.load(table_ptr + key // block_size, mask=key < end, other=0)
    for _ in range(begin, end, block_n):
        slot = block.to(tl.int64) * block_size + key % block_size
        place = slot[:, None] * stride + offs_d[None, :]
        if bounded:
            inside = (key < end)[:, None] & (offs_d < head_dim)[None, :]
            k = tl.load(k_ptr + place, mask=inside, other=0.0)
            v = tl.load(v_ptr + place, mask=inside, other=0.0)
        elif width != head_dim:
            k = tl.load(k_ptr + place, mask=(offs_d < head_dim)[None, :], other=0.0)
            v = tl.load(v_ptr + place, mask=(offs_d < head_dim)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + place)
            v = tl.load(v_ptr + place)
        scores = tl.dot(q, k.trans(1, 0), input_precision="ieee")
        if causal:
            visible = key[None, :] <= position[:, None]
            if window > 0:
                visible = visible & (key[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        elif bounded:
            scores = tl.where((key < end)[None, :], scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        p = tl.exp2(scores * scale - above[:, None])
        shrink = tl.exp2(highest - above)
        total = total * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        highest = above
        key += block_n
        block = tl.load(table_ptr + key // block_size, mask=key < end, other=0)
    return acc, total, highest


@kernel("table_stride", "parts")
def decode_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    log_ptr: tl.tensor,
    table_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    table_stride: tl.tensor,
    q_stride: tl.tensor,
    parts: tl.tensor,
    scale: tl.tensor,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    shortest: tl.constexpr,
    rows: tl.constexpr,
    block_n: tl.constexpr,
    whole: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One part of the context of one sequence, for the heads of one kv head; nothing where its chunk is not one token.

    Shapes: q `[T, H, D]` with tokens `q_stride` apart, k and v `[num_blocks, block_size, num_kv_heads, D]`, out `[T, H, D]`,
    written where the context is `whole`; else part `float32 [S, H, parts, D]` and log `float32 [S, H, parts]`, log2 of the
    part's sum of exp2(score).
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    seq = tl.program_id(2)
    token = tl.load(query_start_ptr + seq)
    if tl.load(query_start_ptr + seq + 1) - token != 1:
        return
    context_len = tl.load(context_lens_ptr + seq)
    first = tl.maximum(context_len - window, 0) if window > 0 else 0
    tokens = part_length(context_len - first, parts, shortest, block_n)
    begin = first + part * tokens
    end = tl.minimum(begin + tokens, context_len)
    if (begin >= end) & (part > 0):
        return
    row = tl.arange(0, rows)
    offs_d = tl.arange(0, width)
    valid = (row < group)[:, None] & (offs_d < head_dim)[None, :]
    head = kv_head * group + row
    within = head[:, None] * head_dim + offs_d[None, :]
    q = tl.load(q_ptr + token.to(tl.int64) * q_stride + within, mask=valid, other=0.0)
    acc = tl.zeros((rows, width), dtype=tl.float32)
    total = tl.zeros((rows,), dtype=tl.float32)
    highest = tl.full((rows,), -1e30, dtype=tl.float32)
    acc, total, highest = attend_keys(
        q,
        acc,
        total,
        highest,
        k_ptr + kv_head * head_dim,
        v_ptr + kv_head * head_dim,
        table_ptr + seq.to(tl.int64) * table_stride,
        row,
        begin,
        end,
        scale,
        num_kv_heads * head_dim,
        head_dim,
        width,
        block_size,
        block_n,
        0,
        True,
        False,
    )
    total = tl.where(total > 0.0, total, 1.0)
    out = acc / total[:, None]
    if whole:
        out_row = out_ptr + token.to(tl.int64) * (num_kv_heads * group * head_dim)
        tl.store(out_row + within, out.to(out_ptr.dtype.element_ty), mask=valid)
    else:
        place = (seq.to(tl.int64) * (num_kv_heads * group) + head) * parts + part
        tl.store(part_ptr + place[:, None] * head_dim + offs_d[None, :], out, mask=valid)
        tl.store(log_ptr + place, highest + tl.log2(total), mask=row < group)


@kernel("parts")
def add_parts_kernel(
    part_ptr: tl.tensor,
    log_ptr: tl.tensor,
    out_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    parts: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    window: tl.constexpr,
    shortest: tl.constexpr,
    block_n: tl.constexpr,
    most_parts: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """One head of one token: the mean of its parts, each weighed by its sum of exp2(score); shapes as in `decode_kernel`."""
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    head = tl.program_id(0)
    seq = tl.program_id(1)
    token = tl.load(query_start_ptr + seq)
    if tl.load(query_start_ptr + seq + 1) - token != 1:
        return
    length = tl.load(context_lens_ptr + seq)
    if window > 0:
        length = tl.minimum(length, window)
    tokens = part_length(length, parts, shortest, block_n)
    part = tl.arange(0, most_parts)
    offs_d = tl.arange(0, width)
    is_part = part * tokens < length
    place = (seq.to(tl.int64) * num_heads + head) * parts + part
    log = tl.load(log_ptr + place, mask=is_part, other=-1e30)
    weight = tl.where(is_part, tl.exp2(log - tl.max(log, axis=0)), 0.0)
    valid = is_part[:, None] & (offs_d < head_dim)[None, :]
    values = tl.load(part_ptr + place[:, None] * head_dim + offs_d[None, :], mask=valid, other=0.0)
    total = tl.sum(weight, axis=0)
    out = tl.sum(values * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    out_row = out_ptr + (token.to(tl.int64) * num_heads + head) * head_dim
    tl.store(out_row + offs_d, out.to(out_ptr.dtype.element_ty), mask=offs_d < head_dim)


def decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    tile: DecodeTile,
    parts: int,
    *,
    overlap: bool,
) -> None:
    """Write the rows of `out` whose chunk is one token.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, the heads of a token one after another.
        key_cache: contiguous `[num_blocks, block_size, num_kv_heads, head_dim]`.
        value_cache: like `key_cache`.
        out: contiguous `[num_tokens, num_heads, head_dim]`.
        metadata: the batch.
        spec: the layer.
        tile: how it is cut.
        parts: the largest number of parts of a context.
        overlap: whether the launch may begin before the kernel ahead of it ends (compute capability 9.0 and up).
    """
    num_seqs, group = metadata.context_lens.shape[0], spec.num_heads // spec.num_kv_heads
    width, window = padded_width(spec.head_dim), spec.sliding_window or 0
    places = (num_seqs, spec.num_heads, parts) if parts > 1 else (0, 0, 0)
    part = torch.empty((*places, spec.head_dim), dtype=torch.float32, device=query.device)
    log = torch.empty(places, dtype=torch.float32, device=query.device)
    decode_kernel[(spec.num_kv_heads, parts, num_seqs)](
        query,
        key_cache,
        value_cache,
        out,
        part,
        log,
        metadata.block_tables,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables.stride(0),
        query.stride(0),
        parts,
        spec.scale * math.log2(math.e),
        num_kv_heads=spec.num_kv_heads,
        group=group,
        head_dim=spec.head_dim,
        width=width,
        block_size=key_cache.shape[1],
        window=window,
        shortest=SHORTEST_PART,
        rows=max(16, power_of_two(group)),
        block_n=tile.block_n,
        whole=parts == 1,
        overlap=overlap,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(overlap=overlap),
    )
    if parts > 1:
        add_parts_kernel[(spec.num_heads, num_seqs)](
            part,
            log,
            out,
            metadata.query_start,
            metadata.context_lens,
            parts,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            width=width,
            window=window,
            shortest=SHORTEST_PART,
            block_n=tile.block_n,
            most_parts=power_of_two(parts),
            overlap=overlap,
            num_warps=4 if parts <= 32 else 8,
            **launch_options(overlap=overlap),
        )


def padded_width(head_dim: int) -> int:
    """A width that products and ranges can have: a power of two, at least 16."""
    return max(16, power_of_two(head_dim))


def power_of_two(size: int) -> int:
    """The smallest power of two that is no less than `size`."""
    return 1 << (size - 1).bit_length()
