"""The state space recurrence of Mamba2 on a GPU (arXiv 2405.21060): a step for decoding, and a scan in blocks for prompts.

Step. One program for a sequence, a head and some of its rows: the state is read, moved on and written once, which is all that
bounds it.

Scan. Over a block of consecutive tokens, with s the step sizes, l the running sum of s * a inside the block and X, B, C the
block's rows, the recurrence is (section 6 there; all decays are at most 1)

    Y = (L * C Bᵀ) X + exp(l) * C Sᵀ,    L[i, j] = exp(l[i] - l[j]) s[j] for j <= i, else 0
    S' = exp(l[-1]) S + Xᵀ (exp(l[-1] - l) s * B)

A program takes a head through its sequence block by block with Sᵀ in registers in fp32, so that a state moves through memory
only where a sequence begins, ends or is saved. A save cuts the blocks: a new run of them begins behind it, and the state is
stored as it is there.

Segments. A few long sequences would leave most of the GPU idle, so they are cut into segments (the pieces of
`causal_conv.py`) that run side by side: a first kernel finds what each segment but the last adds to the state, and the scan of
a segment begins with the sum of what those before it have added, each decayed by those between. One of four products is done
twice. The first kernel also copies the state that a sequence begins with, since the last segment's program writes the new one
there while others may still run.

Single tokens in a batch with longer sequences are left to the kernel of `mamba2_step.py`.

Precision. Operands of the products have the dtype of the activations, sums and the state are fp32. So with bf16 each term of a
sum is off by up to 2^-8 of itself. Products of fp32 are those of IEEE.

What bounds it. The tensor cores, and the latency from one product to the next, which several programs on a multiprocessor
hide from each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.causal_conv import locate, saves_between
from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.mamba2_step import ScanInputs, has_single_tokens, padded, sizes, step_size
from eightfold.kernels.operations import MambaSpec, StateMetadata


@dataclass(frozen=True, slots=True)
class ScanTile:
    """How a scan is cut into programs.

    Attributes:
        block: tokens of a block.
        rows: rows of a head's state in a program.
        num_stages: blocks whose loads are in flight.
        num_warps: warps of a program.
        segment: tokens of a segment, a multiple of `block`; 0 takes every sequence whole.
    """

    block: int
    rows: int
    num_stages: int
    num_warps: int
    segment: int


def choose_scan_tile(
    num_tokens: int, max_query_len: int, spec: MambaSpec, *, num_processors: int, shared_operands: bool
) -> ScanTile:
    """Segments where the longest sequence takes longer than all tokens would, spread evenly over the multiprocessors.

    Args:
        num_tokens: T.
        max_query_len: tokens of the longest sequence.
        spec: the layer.
        num_processors: multiprocessors of the GPU.
        shared_operands: whether its products read operands from shared memory; elsewhere these take registers too.
    """
    if spec.activation_dtype == torch.float32:
        return ScanTile(16, 16, 1, 4, 0)
    rows = min(padded(spec.head_dim), 64 if shared_operands else 32)
    programs = spec.num_heads * -(-spec.head_dim // rows)
    fair = num_tokens * programs // (2 * num_processors)
    segment = max(256, 1 << max(fair - 1, 0).bit_length())
    return ScanTile(64, rows, 2, 4, segment if max_query_len > 2 * segment else 0)


@kernel()
def load_tile(
    pointer: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Rows first .. first + block - 1 of a matrix and some columns; zeros from row `stop` and from column `width` on."""
    row = first + tl.arange(0, block)
    valid = (row < stop)[:, None] & (column < width)[None, :]
    return tl.load(pointer + (row.to(tl.int64) * stride)[:, None] + column[None, :], mask=valid, other=0.0)


@kernel()
def load_dt(dt_ptr: tl.tensor, first: tl.tensor, stop: tl.tensor, stride: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """The dt of a head for the tokens of a block; zeros past its end."""
    row = first + tl.arange(0, block)
    return tl.load(dt_ptr + row.to(tl.int64) * stride, mask=row < stop, other=0.0).to(tl.float32)


@kernel()
def add_and_keep(sum_left: tl.tensor, _left: tl.tensor, sum_right: tl.tensor, right: tl.tensor) -> tl.tensor:
    """Combines two parts of a scan: of the first operand it makes running sums, and the second it leaves as it is."""
    return sum_left + sum_right, right


@kernel()
def steps_of(dt: tl.tensor, bias: tl.tensor, low: tl.tensor, high: tl.tensor, rate: tl.tensor, valid: tl.tensor) -> tl.tensor:
    """Of a block's tokens: the log2 of the decay up to and with each, of that over all, and the step sizes; 0 where not valid.

    Step sizes go through the scan for its side effect on triton: what has been through one is brought into the layouts that the
    products want, and not computed in each of them again.
    """
    step = tl.where(valid, step_size(dt, bias, low, high), 0.0)
    decay = step * rate
    past, step = tl.associative_scan((decay, step), 0, add_and_keep)
    return past, tl.sum(decay, axis=0), step


@kernel()
def take_in(
    state: tl.tensor, x: tl.tensor, b: tl.tensor, past: tl.tensor, total: tl.tensor, step: tl.tensor, precision: tl.constexpr
) -> tl.tensor:
    """Sᵀ after a block, from that before it; the decays are those of `steps_of`."""
    weighed = (x.to(tl.float32) * (tl.exp2(total - past) * step)[:, None]).to(x.dtype)
    return tl.dot(tl.trans(b), weighed, state * tl.exp2(total), input_precision=precision)


@kernel()
def start_index(origin: tl.tensor, number: tl.tensor, segment: tl.tensor) -> tl.tensor:
    """Where the start of a segment is kept: a later one of a sequence may start close to the first of the next."""
    return 2 * (origin // segment + number) + 1 - tl.minimum(number, 1)


@kernel()
def span_of(
    piece: tl.tensor,
    query_start_ptr: tl.tensor,
    num_seqs: tl.tensor,
    segment: tl.tensor,
    segmented: tl.constexpr,
    but_single: tl.constexpr,
) -> tl.tensor:
    """A program's sequence, that one's first token and number of tokens, and the program's part of them: from and up to.

    A program that is to do nothing begins at the end of the sequence.
    """
    if segmented:
        sequence, origin, length, number = locate(piece, query_start_ptr, num_seqs, segment)
        begin = number * segment
        end = tl.minimum(begin + segment, length)
    else:
        sequence = piece
        origin = tl.load(query_start_ptr + sequence)
        length = tl.load(query_start_ptr + sequence + 1) - origin
        begin = 0
        end = length
    if but_single:
        begin = tl.where(length == 1, length, begin)
    return sequence, origin, length, begin, end


@kernel()
def add_earlier(
    state: tl.tensor,
    start_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    origin: tl.tensor,
    number: tl.tensor,
    segment: tl.tensor,
    head: tl.tensor,
    num_heads: tl.constexpr,
    slot_size: tl.constexpr,
    places: tl.tensor,
    valid: tl.tensor,
) -> tl.tensor:
    """The state at the start of a segment: its own for a first one, else what those before it added, each decayed since.

    Without a segment (number -1) the state as it is.
    """
    for earlier in range(tl.maximum(tl.minimum(number, 1), 0), number + 1):
        kept = start_index(origin, earlier, segment).to(tl.int64)
        added = tl.load(start_ptr + kept * slot_size + places, mask=valid, other=0.0)
        state = state * tl.exp2(tl.load(decay_ptr + kept * num_heads + head)) + added
    return state


@kernel("num_seqs", "num_saves", "segment")
def scan_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    y_ptr: tl.tensor,
    start_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    is_new_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    save_sequences_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    save_slots_ptr: tl.tensor,
    num_seqs: tl.tensor,
    num_saves: tl.tensor,
    segment: tl.tensor,
    stride_x: tl.constexpr,
    stride_dt: tl.constexpr,
    stride_b: tl.constexpr,
    stride_c: tl.constexpr,
    low: tl.tensor,
    high: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    heads_per_group: tl.constexpr,
    segmented: tl.constexpr,
    but_single: tl.constexpr,
    block: tl.constexpr,
    block_p: tl.constexpr,
    block_n: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Some rows of one head of one sequence, or of one segment of it.

    Shapes: those of `MambaBackend.scan`, with tokens `stride_*` apart and y contiguous; start and decay as `segment_kernel`
    wrote them. With `but_single` sequences of one token are left alone.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    piece = tl.program_id(1)
    sequence, origin, length, position, end = span_of(piece, query_start_ptr, num_seqs, segment, segmented, but_single)
    if position >= length:
        return
    blocks: tl.constexpr = (head_dim + block_p - 1) // block_p
    slot_size: tl.constexpr = num_heads * head_dim * state_size
    head = tl.program_id(0) // blocks
    p = tl.program_id(0) % blocks * block_p + tl.arange(0, block_p)
    n = tl.arange(0, block_n)
    valid = (n < state_size)[:, None] & (p < head_dim)[None, :]
    places = head * head_dim * state_size + p[None, :] * state_size + n[:, None]
    slot = tl.load(slots_ptr + sequence)
    is_known = tl.where((tl.load(is_new_ptr + sequence) == 0) & (end - position == length), valid, False)
    state = tl.load(state_ptr + slot * slot_size + places, mask=is_known, other=0.0).to(tl.float32)
    if segmented:
        number = tl.where(length > segment, position // segment, -1)
        state = add_earlier(state, start_ptr, decay_ptr, origin, number, segment, head, num_heads, slot_size, places, valid)
    token = origin.to(tl.int64)
    x_ptr += token * stride_x + head * head_dim
    dt_ptr += token * stride_dt + head
    b_ptr += token * stride_b + head // heads_per_group * state_size
    c_ptr += token * stride_c + head // heads_per_group * state_size
    y_ptr += (token * num_heads + head) * head_dim
    rate, bias, skip = tl.load(a_ptr + head) * 1.4426950408889634, tl.load(dt_bias_ptr + head), tl.load(d_ptr + head)
    row = tl.arange(0, block)
    causal = row[:, None] >= row[None, :]
    first_save, last_save = saves_between(save_sequences_ptr, save_lengths_ptr, num_saves, sequence, position, end)
    for save in range(first_save, last_save + 1):
        is_save = save < last_save
        stop = tl.load(save_lengths_ptr + save, mask=is_save, other=end).to(tl.int32)
        dt = load_dt(dt_ptr, position, stop, stride_dt, block)
        for first in tl.range(position, stop, block, num_stages=stages):
            x = load_tile(x_ptr, first, stop, stride_x, p, head_dim, block)
            b = load_tile(b_ptr, first, stop, stride_b, n, state_size, block)
            c = load_tile(c_ptr, first, stop, stride_c, n, state_size, block)
            past, total, step = steps_of(dt, bias, low, high, rate, first + row < stop)
            dt = load_dt(dt_ptr, first + block, stop, stride_dt, block)
            scores = tl.dot(c, tl.trans(b), input_precision=precision)
            y = tl.dot(c, state.to(c.dtype), input_precision=precision) * tl.exp2(past)[:, None]
            scores *= tl.exp2(past[:, None] - (past - tl.log2(step))[None, :])
            y = tl.dot(tl.where(causal, scores, 0.0).to(x.dtype), x, y, input_precision=precision)
            state = take_in(state, x, b, past, total, step, precision)
            y = (y + skip * x.to(tl.float32)).to(y_ptr.dtype.element_ty)
            y_rows = y_ptr + ((first + row).to(tl.int64) * (num_heads * head_dim))[:, None]
            tl.store(y_rows + p[None, :], y, mask=(first + row < stop)[:, None] & (p < head_dim)[None, :])
        target = tl.load(save_slots_ptr + save, mask=is_save, other=slot)
        kept = tl.where(is_save | (end == length), valid, False)
        tl.store(state_ptr + target * slot_size + places, state.to(state_ptr.dtype.element_ty), mask=kept)
        position = stop


@kernel("num_seqs", "segment")
def segment_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    start_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    is_new_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    num_seqs: tl.tensor,
    segment: tl.tensor,
    stride_x: tl.constexpr,
    stride_dt: tl.constexpr,
    stride_b: tl.constexpr,
    low: tl.tensor,
    high: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    heads_per_group: tl.constexpr,
    block: tl.constexpr,
    block_p: tl.constexpr,
    block_n: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """What a segment adds to a head's state, and the log2 of what it leaves of the state before it; not for a last segment.

    Shapes: as in `scan_kernel`. Both are kept for the segment behind it, start `float32 [kept, H, P, N]` and decay
    `float32 [kept, H]`. What a first segment adds contains the state from before it, which is also kept as its own start.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    sequence, origin, length, number = locate(tl.program_id(1), query_start_ptr, num_seqs, segment)
    position = number * segment
    stop = position + segment
    if stop >= length:
        return
    blocks: tl.constexpr = (head_dim + block_p - 1) // block_p
    head = tl.program_id(0) // blocks
    p = tl.program_id(0) % blocks * block_p + tl.arange(0, block_p)
    n = tl.arange(0, block_n)
    token = origin.to(tl.int64)
    x_ptr += token * stride_x + head * head_dim
    dt_ptr += token * stride_dt + head
    b_ptr += token * stride_b + head // heads_per_group * state_size
    rate = tl.load(a_ptr + head) * 1.4426950408889634
    bias = tl.load(dt_bias_ptr + head)
    valid = (n < state_size)[:, None] & (p < head_dim)[None, :]
    slot_size: tl.constexpr = num_heads * head_dim * state_size
    places = head * head_dim * state_size + p[None, :] * state_size + n[:, None]
    is_known = tl.where((tl.load(is_new_ptr + sequence) == 0) & (number == 0), valid, False)
    slot = tl.load(slots_ptr + sequence)
    state = tl.load(state_ptr + slot * slot_size + places, mask=is_known, other=0.0).to(tl.float32)
    if number == 0:
        own = start_index(origin, number, segment).to(tl.int64)
        tl.store(start_ptr + own * slot_size + places, state, mask=valid)
        tl.store(decay_ptr + own * num_heads + head, 0.0)
    whole = 0.0
    dt = load_dt(dt_ptr, position, stop, stride_dt, block)
    for first in tl.range(position, stop, block, num_stages=stages):
        x = load_tile(x_ptr, first, stop, stride_x, p, head_dim, block)
        b = load_tile(b_ptr, first, stop, stride_b, n, state_size, block)
        past, total, step = steps_of(dt, bias, low, high, rate, first + tl.arange(0, block) < stop)
        dt = load_dt(dt_ptr, first + block, stop, stride_dt, block)
        state = take_in(state, x, b, past, total, step, precision)
        whole += total
    following = start_index(origin, number + 1, segment).to(tl.int64)
    tl.store(start_ptr + following * slot_size + places, state, mask=valid)
    tl.store(decay_ptr + following * num_heads + head, whole)


def scan(
    inputs: ScanInputs, ssm_state: Tensor, y: Tensor, metadata: StateMetadata, spec: MambaSpec, tile: ScanTile, *, overlap: bool
) -> None:
    """Take in sequences of any lengths, those of one token apart where some may be longer and some may not.

    Args:
        inputs: the operands.
        ssm_state: `[num_slots, H, P, N]`, contiguous.
        y: `[T, H, P]`, contiguous; written.
        metadata: where the sequences and their states are.
        spec: the layer.
        tile: how the work is cut.
        overlap: whether the launches may begin before the kernels ahead of them end (compute capability 9.0 and up).
    """
    num_tokens, num_seqs, num_saves = y.shape[0], metadata.slots.shape[0], metadata.save_slots.shape[0]
    programs = spec.num_heads * -(-spec.head_dim // tile.rows)
    pieces = num_tokens // tile.segment + num_seqs if tile.segment else num_seqs
    start, decay = _kept_states(num_tokens, tile.segment, spec, y.device)
    where = (metadata.slots, metadata.is_new, metadata.query_start)
    options = {
        **sizes(spec),
        "block": tile.block,
        "block_p": tile.rows,
        "precision": "ieee",
        "stages": tile.num_stages,
        "overlap": overlap,
        "num_warps": tile.num_warps,
        **launch_options(overlap=overlap),
    }
    if tile.segment:
        segment_kernel[(programs, pieces)](
            inputs.x,
            inputs.dt,
            inputs.a,
            inputs.b,
            inputs.dt_bias,
            ssm_state,
            start,
            decay,
            *where,
            num_seqs,
            tile.segment,
            *inputs.strides[:3],
            *spec.dt_limits,
            **options,
        )
    scan_kernel[(programs, pieces)](
        inputs.x,
        inputs.dt,
        inputs.a,
        inputs.b,
        inputs.c,
        inputs.d,
        inputs.dt_bias,
        ssm_state,
        y,
        start,
        decay,
        *where,
        metadata.save_sequences,
        metadata.save_lengths,
        metadata.save_slots,
        num_seqs,
        num_saves,
        tile.segment,
        *inputs.strides,
        *spec.dt_limits,
        segmented=tile.segment > 0,
        but_single=has_single_tokens(metadata, num_tokens),
        **options,
    )


def _kept_states(num_tokens: int, segment: int, spec: MambaSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the states at the starts of segments, and for their decays, as `start_index` deals it out."""
    kept = 2 * (num_tokens // segment + 1) if segment else 0
    start = torch.empty((kept, spec.num_heads, spec.head_dim, spec.state_size), dtype=torch.float32, device=device)
    return start, torch.empty((kept, spec.num_heads), dtype=torch.float32, device=device)
