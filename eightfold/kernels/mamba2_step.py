"""One token of Mamba2's recurrence for each sequence, on a GPU, and what the scan in `mamba2.py` shares with it.

A program takes some rows of the state of one head of one sequence: reads it, moves it on, writes it and gives those rows of y.
What bounds it is the memory that the states move through, once each way.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from eightfold.kernels.causal_conv import saves_between
from eightfold.kernels.jit import kernel, launch_dependents, launch_options, tl, wait_for_predecessor
from eightfold.kernels.operations import MambaSpec, StateMetadata


@dataclass(frozen=True, slots=True)
class StepTile:
    """How a step is cut into programs.

    Attributes:
        rows: rows of a head's state in a program.
        num_warps: warps of a program.
    """

    rows: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """The operands of a scan, as `MambaBackend.scan` names them; heads and what is in them lie beside each other."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    dt_bias: Tensor

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """How far tokens of x, dt, b and c lie apart, in elements."""
        return self.x.stride(0), self.dt.stride(0), self.b.stride(0), self.c.stride(0)


def padded(size: int) -> int:
    """The power of two that holds `size`, at least what a product takes."""
    return max(16, 1 << (size - 1).bit_length())


def sizes(spec: MambaSpec) -> dict[str, int]:
    """What a layer's kernels are compiled for."""
    return {
        "num_heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "state_size": spec.state_size,
        "heads_per_group": spec.num_heads // spec.num_groups,
        "block_n": padded(spec.state_size),
    }


def choose_step_tile(num_seqs: int, spec: MambaSpec) -> StepTile:
    """A head's whole state to a program, unless that leaves multiprocessors idle."""
    rows = padded(spec.head_dim)
    return StepTile(rows, 4) if num_seqs * spec.num_heads >= 1024 else StepTile(min(rows, 16), 2)


@kernel()
def step_size(dt: tl.tensor, bias: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """clamp(softplus(dt + bias)) in fp32, exact where it is small too: log(1 + e) is 2 artanh(e / (2 + e)), a series."""
    value = dt.to(tl.float32) + bias
    e = tl.exp2(-1.4426950408889634 * tl.abs(value))
    z = e / (2.0 + e)
    q = z * z
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    return tl.minimum(tl.maximum(tl.maximum(value, 0.0) + 2.0 * z * series, low), high)


@kernel("num_saves")
def scan_step_kernel(
    x_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    c_ptr: tl.tensor,
    d_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    state_ptr: tl.tensor,
    y_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    is_new_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    save_sequences_ptr: tl.tensor,
    save_lengths_ptr: tl.tensor,
    save_slots_ptr: tl.tensor,
    num_saves: tl.tensor,
    stride_x: tl.tensor,
    stride_dt: tl.tensor,
    stride_b: tl.tensor,
    stride_c: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    state_size: tl.constexpr,
    heads_per_group: tl.constexpr,
    all_single: tl.constexpr,
    has_saves: tl.constexpr,
    block_p: tl.constexpr,
    block_n: tl.constexpr,
    overlap: tl.constexpr,
) -> None:
    """Some rows of one head of one sequence of one token; longer sequences are left alone.

    Shapes: those of `MambaBackend.scan`, with tokens `stride_*` apart and y contiguous.
    """
    if overlap:
        launch_dependents()
        wait_for_predecessor()
    sequence = tl.program_id(1)
    token = sequence.to(tl.int64)
    if not all_single:
        token = tl.load(query_start_ptr + sequence).to(tl.int64)
        if tl.load(query_start_ptr + sequence + 1) != token + 1:
            return
    blocks: tl.constexpr = (head_dim + block_p - 1) // block_p
    head = tl.program_id(0) // blocks
    group = head // heads_per_group
    row = tl.program_id(0) % blocks * block_p + tl.arange(0, block_p)
    column = tl.arange(0, block_n)
    p_valid, n_valid = row < head_dim, column < state_size
    valid = p_valid[:, None] & n_valid[None, :]
    places = head * head_dim * state_size + row[:, None] * state_size + column[None, :]
    slot_size: tl.constexpr = num_heads * head_dim * state_size
    own = state_ptr + tl.load(slots_ptr + sequence) * slot_size + places
    is_known = tl.where(tl.load(is_new_ptr + sequence) == 0, valid, False)
    state = tl.load(own, mask=is_known, other=0.0).to(tl.float32)
    step = step_size(tl.load(dt_ptr + token * stride_dt + head), tl.load(dt_bias_ptr + head), low, high)
    x = tl.load(x_ptr + token * stride_x + head * head_dim + row, mask=p_valid, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + token * stride_b + group * state_size + column, mask=n_valid, other=0.0).to(tl.float32)
    c = tl.load(c_ptr + token * stride_c + group * state_size + column, mask=n_valid, other=0.0).to(tl.float32)
    state = tl.exp2(step * (1.4426950408889634 * tl.load(a_ptr + head))) * state + (step * x)[:, None] * b[None, :]
    stored = state.to(state_ptr.dtype.element_ty)
    tl.store(own, stored, mask=valid)
    y = tl.sum(state * c[None, :], axis=1) + tl.load(d_ptr + head) * x
    tl.store(y_ptr + (token * num_heads + head) * head_dim + row, y.to(y_ptr.dtype.element_ty), mask=p_valid)
    if has_saves:
        first, last = saves_between(save_sequences_ptr, save_lengths_ptr, num_saves, sequence, 0, 1)
        for save in range(first, last):
            tl.store(state_ptr + tl.load(save_slots_ptr + save) * slot_size + places, stored, mask=valid)


def scan_step(
    inputs: ScanInputs, ssm_state: Tensor, y: Tensor, metadata: StateMetadata, spec: MambaSpec, tile: StepTile, *, overlap: bool
) -> None:
    """Take in the sequences that have one token.

    Args:
        inputs: the operands.
        ssm_state: `[num_slots, H, P, N]`, contiguous.
        y: `[T, H, P]`, contiguous; the rows of those tokens are written.
        metadata: where the sequences and their states are.
        spec: the layer.
        tile: how the work is cut.
        overlap: whether the launch may begin before the kernel ahead of it ends (compute capability 9.0 and up).
    """
    num_seqs, num_saves = metadata.slots.shape[0], metadata.save_slots.shape[0]
    scan_step_kernel[(spec.num_heads * -(-spec.head_dim // tile.rows), num_seqs)](
        inputs.x,
        inputs.dt,
        inputs.a,
        inputs.b,
        inputs.c,
        inputs.d,
        inputs.dt_bias,
        ssm_state,
        y,
        metadata.slots,
        metadata.is_new,
        metadata.query_start,
        metadata.save_sequences,
        metadata.save_lengths,
        metadata.save_slots,
        num_saves,
        *inputs.strides,
        *spec.dt_limits,
        **sizes(spec),
        all_single=metadata.max_query_len == 1 and y.shape[0] == num_seqs,
        has_saves=num_saves > 0,
        block_p=tile.rows,
        overlap=overlap,
        num_warps=tile.num_warps,
        **launch_options(overlap=overlap),
    )


def has_single_tokens(metadata: StateMetadata, num_tokens: int) -> bool:
    """Whether some sequences may have one token, as far as the host knows; those are left to `scan_step`."""
    return num_tokens <= (metadata.slots.shape[0] - 1) * metadata.max_query_len + 1
