"""The causal depthwise convolution of Mamba2 on a GPU, over sequences of unequal lengths whose last inputs are carried over.

Pieces. The tokens of a batch are cut at the start of each sequence and every `length` tokens from there. Sequence s owns the
pieces from query_start[s] // length + s on, which leaves room for all of its own: so T // length + S programs cover every
batch, each finds its sequence from `query_start` alone, and the host is never asked. A program whose piece is past the end of
its sequence leaves at once.

States. The program of a sequence's first piece alone touches the states: it reads the old one, and then writes what the
sequence leaves behind, at its end and at each save, since inputs are there to be read by anyone. Where every sequence has one
token, a kernel of its own takes a token and a state at once.

What bounds it. Memory: inputs are read once from there, and the other taps find them in the L1 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.operations import StateMetadata


@dataclass(frozen=True, slots=True)
class ConvTile:
    """How the convolution is cut into programs.

    Attributes:
        tokens: length of a piece.
        channels: channels of a program.
        num_warps: warps of a program.
    """

    tokens: int
    channels: int
    num_warps: int


PREFILL_TILE = ConvTile(64, 128, 8)
DECODE_TILE = ConvTile(1, 256, 4)


@kernel()
def locate(piece: tl.tensor, query_start_ptr: tl.tensor, num_seqs: tl.tensor, length: tl.tensor) -> tl.tensor:
    """The sequence that owns a piece, the sequence's first token and its number of tokens, and the piece's number in it."""
    sequence = -1
    for begin in range(0, num_seqs, 256):
        candidate = begin + tl.arange(0, 256)
        start = tl.load(query_start_ptr + candidate, mask=candidate < num_seqs, other=0)
        begins = (start // length + candidate <= piece) & (candidate < num_seqs)
        sequence += tl.sum(begins.to(tl.int32), axis=0)
    start = tl.load(query_start_ptr + sequence)
    return sequence, start, tl.load(query_start_ptr + sequence + 1) - start, piece - start // length - sequence


@kernel()
def saves_between(
    owners_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    num_saves: tl.tensor,
    sequence: tl.tensor,
    after: tl.tensor,
    upto: tl.tensor,
) -> tl.tensor:
    """Of the saves of a sequence, those at lengths over `after` and at most `upto`: the first, and one past the last."""
    low = 0
    high = 0
    for begin in range(0, num_saves, 128):
        save = begin + tl.arange(0, 128)
        valid = save < num_saves
        owner = tl.load(owners_ptr + save, mask=valid, other=0)
        length = tl.load(lengths_ptr + save, mask=valid, other=0)
        earlier = valid & (owner < sequence)
        own = valid & (owner == sequence)
        low += tl.sum((earlier | (own & (length <= after))).to(tl.int32), axis=0)
        high += tl.sum((earlier | (own & (length <= upto))).to(tl.int32), axis=0)
    return low, high


@kernel()
def load_window(
    x_row: tl.tensor,
    old_ptr: tl.tensor,
    is_new: tl.tensor,
    taken: tl.tensor,
    channel: tl.tensor,
    num_channels: tl.constexpr,
    stride_x: tl.constexpr,
    width: tl.constexpr,
    remembered: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tensor:
    """`[channels, columns]`: the last `width` inputs of a sequence after `taken` tokens, some of them from its old state."""
    column = tl.arange(0, columns)[None, :]
    valid = (channel < num_channels)[:, None] & (column < width)
    position = taken - width + column
    pointers = x_row + position.to(tl.int64) * stride_x + channel[:, None]
    fresh = tl.load(pointers, mask=valid & (position >= 0), other=0.0)
    from_old = tl.where(is_new == 0, valid & (position < 0), False)
    kept = tl.load(old_ptr + channel[:, None] * remembered + (remembered + position), mask=from_old, other=0.0)
    return tl.where(position >= 0, fresh, kept)


@kernel("num_seqs", "num_saves")
def conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    is_new_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    save_sequences_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    save_slots_ptr: tl.tensor,
    num_seqs: tl.tensor,
    num_saves: tl.tensor,
    num_channels: tl.constexpr,
    stride_x: tl.constexpr,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    columns: tl.constexpr,
    block_t: tl.constexpr,
    block_c: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A block of channels of one piece, and for a first piece the states of its sequence.

    Shapes: x `[T, C]` with rows `stride_x` apart, weight `[C, taps]`, bias `[C]`, state `[slots, C, taps - 1]`, y `[T, C]`.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    sequence, start, length, number = locate(tl.program_id(1), query_start_ptr, num_seqs, block_t)
    first = number * block_t
    if first >= length:
        return
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    c_valid = channel < num_channels
    row = tl.arange(0, block_t)
    token = (start + first + row).to(tl.int64)
    x_rows = x_ptr + (token * stride_x)[:, None] + channel[None, :]
    acc = tl.zeros((block_t, block_c), dtype=tl.float32)
    if has_bias:
        acc += tl.load(bias_ptr + channel, mask=c_valid, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(taps):
        source = first + row + (tap - taps + 1)
        inside = ((source >= 0) & (source < length))[:, None] & c_valid[None, :]
        value = tl.load(x_rows + (tap - taps + 1) * stride_x, mask=inside, other=0.0).to(tl.float32)
        acc += tl.load(weight_ptr + channel * taps + tap, mask=c_valid, other=0.0).to(tl.float32)[None, :] * value
    # The first tokens of a sequence also see its state, and are done below.
    stored = ((first + row < length) & (first + row >= taps - 1))[:, None] & c_valid[None, :]
    y_rows = y_ptr + (token * num_channels)[:, None]
    tl.store(y_rows + channel[None, :], (acc * tl.sigmoid(acc)).to(y_ptr.dtype.element_ty), mask=stored)
    if first > 0:
        return
    x_row = x_ptr + start.to(tl.int64) * stride_x
    state_size: tl.constexpr = num_channels * (taps - 1)
    is_new = tl.load(is_new_ptr + sequence)
    old = state_ptr + tl.load(slots_ptr + sequence) * state_size
    column = tl.arange(0, columns)[None, :]
    taps_valid = c_valid[:, None] & (column < taps)
    weight = tl.load(weight_ptr + channel[:, None] * taps + column, mask=taps_valid, other=0.0).to(tl.float32)
    for taken in range(tl.minimum(length, taps - 1)):
        window = load_window(x_row, old, is_new, taken + 1, channel, num_channels, stride_x, taps, taps - 1, columns)
        head = tl.sum(weight * window.to(tl.float32), axis=1)
        if has_bias:
            head += tl.load(bias_ptr + channel, mask=c_valid, other=0.0).to(tl.float32)
        y_row = y_ptr + (start + taken).to(tl.int64) * num_channels
        tl.store(y_row + channel, (head * tl.sigmoid(head)).to(y_ptr.dtype.element_ty), mask=c_valid)
    is_kept = c_valid[:, None] & (column < taps - 1)
    places = channel[:, None] * (taps - 1) + column
    low, high = saves_between(save_sequences_ptr, save_lengths_ptr, num_saves, sequence, 0, length)
    for save in range(low, high):
        taken = tl.load(save_lengths_ptr + save).to(tl.int32)
        window = load_window(x_row, old, is_new, taken, channel, num_channels, stride_x, taps - 1, taps - 1, columns)
        tl.store(state_ptr + tl.load(save_slots_ptr + save) * state_size + places, window, mask=is_kept)
    window = load_window(x_row, old, is_new, length, channel, num_channels, stride_x, taps - 1, taps - 1, columns)
    # A thread may write where another one has yet to read.
    tl.debug_barrier()
    tl.store(old + places, window, mask=is_kept)


@kernel("num_saves")
def conv_step_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    is_new_ptr: tl.tensor,
    save_sequences_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    save_slots_ptr: tl.tensor,
    num_saves: tl.tensor,
    num_channels: tl.tensor,
    stride_x: tl.tensor,
    taps: tl.constexpr,
    has_bias: tl.constexpr,
    has_saves: tl.constexpr,
    columns: tl.constexpr,
    block_c: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """A block of channels of the one token of a sequence: the state, the token behind it, and the state moved on by one.

    Shapes: x `[S, C]` with rows `stride_x` apart, weight `[C, taps]`, bias `[C]`, state `[slots, C, taps - 1]`, y `[S, C]`.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    sequence = tl.program_id(1)
    channel = tl.program_id(0) * block_c + tl.arange(0, block_c)
    c_valid = channel < num_channels
    column = tl.arange(0, columns)[None, :]
    state_size = num_channels * (taps - 1)
    old = state_ptr + tl.load(slots_ptr + sequence) * state_size
    places = channel[:, None] * (taps - 1) + column
    is_kept = c_valid[:, None] & (column < taps - 1)
    kept = tl.load(old + places, mask=tl.where(tl.load(is_new_ptr + sequence) == 0, is_kept, False), other=0.0)
    x = tl.load(x_ptr + sequence.to(tl.int64) * stride_x + channel, mask=c_valid, other=0.0)
    window = tl.where(column == taps - 1, x[:, None], kept)
    taps_valid = c_valid[:, None] & (column < taps)
    weight = tl.load(weight_ptr + channel[:, None] * taps + column, mask=taps_valid, other=0.0)
    acc = tl.sum(weight.to(tl.float32) * window.to(tl.float32), axis=1)
    if has_bias:
        acc += tl.load(bias_ptr + channel, mask=c_valid, other=0.0).to(tl.float32)
    y = (acc * tl.sigmoid(acc)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + sequence.to(tl.int64) * num_channels + channel, y, mask=c_valid)
    # A thread may write where another one has yet to read.
    tl.debug_barrier()
    is_moved = taps_valid & (column >= 1)
    tl.store(old + places - 1, window, mask=is_moved)
    if has_saves:
        low, high = saves_between(save_sequences_ptr, save_lengths_ptr, num_saves, sequence, 0, 1)
        for save in range(low, high):
            tl.store(state_ptr + tl.load(save_slots_ptr + save) * state_size + places - 1, window, mask=is_moved)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    metadata: StateMetadata,
    *,
    overlap: bool,
    tile: ConvTile | None = None,
) -> Tensor:
    """silu of the convolution, `[T, C]`; shapes and formula are those of `MambaBackend.conv`.

    Args:
        x: `[T, C]`; rows may lie apart.
        weight: `[C, kernel]`, contiguous.
        bias: `[C]` or None.
        conv_state: `[num_slots, C, kernel - 1]`, contiguous.
        metadata: where the sequences and their states are.
        overlap: whether the launch may begin before the kernel ahead of it ends (compute capability 9.0 and up).
        tile: how the work is cut; by default what was found fastest.
    """
    num_tokens, num_channels = x.shape
    num_seqs, taps = metadata.slots.shape[0], weight.shape[1]
    y = torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device)
    decodes = metadata.max_query_len == 1 and num_tokens == num_seqs
    tile = tile or (DECODE_TILE if decodes else PREFILL_TILE)
    blocks = -(-num_channels // tile.channels)
    num_saves = metadata.save_slots.shape[0]
    saves = (metadata.save_sequences, metadata.save_lengths, metadata.save_slots)
    states = (weight if bias is None else bias, conv_state, y, metadata.slots, metadata.is_new)
    options = {"has_bias": bias is not None, "overlap": overlap, "num_warps": tile.num_warps, **launch_options(overlap=overlap)}
    if decodes:
        conv_step_kernel[(blocks, num_seqs)](
            x,
            weight,
            *states,
            *saves,
            num_saves,
            num_channels,
            x.stride(0),
            taps=taps,
            has_saves=num_saves > 0,
            columns=1 << (taps - 1).bit_length(),
            block_c=tile.channels,
            **options,
        )
    else:
        conv_kernel[(blocks, num_tokens // tile.tokens + num_seqs)](
            x,
            weight,
            *states,
            metadata.query_start,
            *saves,
            num_seqs,
            num_saves,
            num_channels=num_channels,
            stride_x=x.stride(0),
            taps=taps,
            columns=1 << (taps - 1).bit_length(),
            block_t=tile.tokens,
            block_c=tile.channels,
            **options,
        )
    return y
