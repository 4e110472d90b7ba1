"""Batches of sequences for the kernels of Mamba2, and what they should give, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from eightfold.kernels.mamba2_step import ScanInputs
from eightfold.kernels.operations import MambaSpec, StateMetadata
from eightfold.kernels.reference_mixers import ReferenceMamba
from tests.oracle import assert_matches
from tests.tolerances import Tolerance

Save: TypeAlias = tuple[int, int]
"""A sequence, and after how many of its tokens."""
Exact: TypeAlias = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Outputs and states, each with the sums of magnitudes behind its elements."""

FP32_SCAN = Tolerance(
    "fp32 scan",
    5e-6,
    2e-5,
    0.0,
    "a decay is 2 to the difference of two running sums of step * a over a block; these reach 2^7 here, and fp32 rounds them "
    "by 2^-18, so that a term is off by up to 2^-17 of itself",
    (torch.float32,),
)
BF16_SCAN = Tolerance(
    "bf16 scan",
    6e-3,
    2**-7,
    2**-8,
    "two operands of each product are rounded to bf16, by 2^-9 each and once more where a state goes from block to block, and "
    "so is the result; as a norm these are 1.7e-3 each, and independent",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A batch: rows of one projection, parameters, and states that are NaN wherever nothing may be read.

    Attributes:
        spec: the layer.
        metadata: sequences, slots and saves.
        projection: `[T, 8 + C + H + 8]`: inputs of the convolution and step sizes, between columns that are nobody's.
        weight: `[C, kernel]`.
        bias: `[C]`.
        a: `float32 [H]`; also `d` and `dt_bias`.
        conv_state: `[slots, C, kernel - 1]`.
        ssm_state: `[slots, H, P, N]`.
    """

    spec: MambaSpec
    metadata: StateMetadata
    projection: Tensor
    weight: Tensor
    bias: Tensor
    a: Tensor
    d: Tensor
    dt_bias: Tensor
    conv_state: Tensor
    ssm_state: Tensor

    @property
    def conv_inputs(self) -> Tensor:
        """`[T, C]`, a view."""
        return self.projection[:, 8 : 8 + len(self.weight)]

    @property
    def scan_inputs(self) -> ScanInputs:
        """Views of the projection as if there were no convolution."""
        spec, columns = self.spec, self.conv_inputs
        inner, group = spec.num_heads * spec.head_dim, spec.num_groups * spec.state_size
        x, b, c = columns.split((inner, group, group), dim=1)
        return ScanInputs(
            x.unflatten(1, (spec.num_heads, spec.head_dim)),
            self.projection[:, 8 + len(self.weight) :][:, : spec.num_heads],
            self.a,
            b.unflatten(1, (spec.num_groups, spec.state_size)),
            c.unflatten(1, (spec.num_groups, spec.state_size)),
            self.d,
            self.dt_bias,
        )

    def fresh(self) -> Problem:
        """The same with states of its own."""
        return replace(self, conv_state=self.conv_state.clone(), ssm_state=self.ssm_state.clone())


def make_spec(
    num_heads: int = 4,
    head_dim: int = 20,
    state_size: int = 33,
    num_groups: int = 2,
    *,
    conv_kernel: int = 4,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> MambaSpec:
    """A layer with odd sizes, unless told otherwise."""
    return MambaSpec("layer", num_heads, head_dim, state_size, num_groups, conv_kernel, dt_limits, dtype, state_dtype)


def make_metadata(
    lengths: Sequence[int], saves: Sequence[Save] = (), *, is_new: Sequence[bool] | None = None, device: str = "cpu"
) -> StateMetadata:
    """Slots in no order, three of them unused; by default every other sequence is new."""
    num_seqs = len(lengths)
    order = torch.randperm(num_seqs + len(saves) + 3, generator=torch.Generator().manual_seed(num_seqs))
    is_new = [sequence % 2 == 0 for sequence in range(num_seqs)] if is_new is None else is_new
    return StateMetadata(
        slots=order[:num_seqs].clone().to(device),
        is_new=torch.tensor(is_new).to(device),
        query_start=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        save_sequences=torch.tensor([sequence for sequence, _ in saves], dtype=torch.int64).to(device),
        save_lengths=torch.tensor([length for _, length in saves], dtype=torch.int64).to(device),
        save_slots=order[num_seqs : num_seqs + len(saves)].clone().to(device),
        max_query_len=max(lengths),
    )


def make_problem(spec: MambaSpec, metadata: StateMetadata, *, seed: int = 0) -> Problem:
    """Random operands: steps of 0.01 to 3, decays from slow to fast, and heads that differ in both."""
    generator = torch.Generator().manual_seed(seed)
    device, num_heads = metadata.slots.device, spec.num_heads
    channels = num_heads * spec.head_dim + 2 * spec.num_groups * spec.state_size
    num_slots = len(metadata.slots) + len(metadata.save_slots) + 3

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    conv_state = randn(num_slots, channels, spec.conv_kernel - 1).to(spec.activation_dtype).to(device)
    ssm_state = randn(num_slots, num_heads, spec.head_dim, spec.state_size).to(spec.state_dtype).to(device)
    known = metadata.slots[~metadata.is_new]
    for states in (conv_state, ssm_state):
        unread = torch.ones(num_slots, dtype=torch.bool, device=device)
        unread[known] = False
        states[unread] = float("nan")
    num_tokens = int(metadata.query_start[-1])
    return Problem(
        spec=spec,
        metadata=metadata,
        projection=randn(num_tokens, channels + num_heads + 16).to(spec.activation_dtype).to(device),
        weight=randn(channels, spec.conv_kernel).to(spec.activation_dtype).to(device),
        bias=randn(channels).to(spec.activation_dtype).to(device),
        a=-torch.exp(torch.linspace(-4, 1, num_heads)).to(device),
        d=randn(num_heads).to(device),
        dt_bias=torch.linspace(-4, 0, num_heads).flip(0).to(device),
        conv_state=conv_state,
        ssm_state=ssm_state,
    )


def check_conv(problem: Problem, found: Tensor, conv_state: Tensor, tolerance: Tolerance) -> None:
    """Outputs within a tolerance, states bit for bit, and no other slot written."""
    exact, states = problem.fresh(), problem.conv_state.clone()
    reference, weight, bias = ReferenceMamba(), exact.weight, exact.bias
    reference.conv(exact.conv_inputs, weight, bias, states, exact.metadata, exact.spec)
    assert_same_bits(conv_state, states)
    starts = exact.metadata.query_start.tolist()
    expected = torch.empty(found.shape, dtype=torch.float64, device=found.device)
    for index, slot in enumerate(exact.metadata.slots.tolist()):
        rows = exact.conv_inputs[starts[index] : starts[index + 1]].double()
        old = torch.zeros_like(exact.conv_state[slot]) if exact.metadata.is_new[index] else exact.conv_state[slot]
        padded = torch.cat((old.T.double(), rows)).T[None]  # [1, C, kernel - 1 + length]
        sums = torch.nn.functional.conv1d(padded, weight.double()[:, None], bias.double(), groups=len(weight))
        expected[starts[index] : starts[index + 1]] = torch.nn.functional.silu(sums[0].T)
    assert_matches(found, expected, tolerance, torch.full_like(expected, float(expected.abs().max())))


def check_scan(
    problem: Problem,
    found: Tensor,
    ssm_state: Tensor,
    tolerance: Tolerance,
    state_tolerance: Tolerance | None = None,
    *,
    exact: Exact | None = None,
) -> None:
    """Outputs and states within their tolerances of what is `exact`, and no other slot written."""
    (expected, magnitude), (states, sizes) = exact or scan_exactly(problem)
    assert_matches(found, expected, tolerance, magnitude)
    written = torch.cat((problem.metadata.slots, problem.metadata.save_slots))
    assert_matches(ssm_state[written], states[written], state_tolerance or tolerance, sizes[written])
    rest = torch.ones(len(ssm_state), dtype=torch.bool, device=ssm_state.device)
    rest[written] = False
    assert_same_bits(ssm_state[rest], problem.ssm_state[rest])


def scan_exactly(problem: Problem) -> Exact:
    """y `[T, H, P]` and the states in their slots, token by token, each with the sums of magnitudes behind its elements."""
    spec, metadata, inputs = problem.spec, problem.metadata, problem.scan_inputs
    heads = spec.num_heads // spec.num_groups
    x = inputs.x.double()
    b, c = (part.double().repeat_interleave(heads, dim=1) for part in (inputs.b, inputs.c))  # [T, H, N]
    step = torch.nn.functional.softplus(inputs.dt.double() + inputs.dt_bias.double()).clamp(*spec.dt_limits)  # [T, H]
    decay = torch.exp(step * inputs.a.double())
    state = problem.ssm_state[metadata.slots].double()  # [S, H, P, N]
    state[metadata.is_new] = 0.0
    size = state.abs()
    states = torch.zeros_like(problem.ssm_state, dtype=torch.float64)
    sizes = torch.zeros_like(states)
    y, y_size = torch.empty_like(x), torch.empty_like(x)
    skip = inputs.d.double()[:, None] * x
    starts = metadata.query_start.long()
    lengths = starts[1:] - starts[:-1]
    for taken in range(1, metadata.max_query_len + 1):
        live = (lengths >= taken).nonzero().flatten()
        token = starts[live] + taken - 1
        fade, added = decay[token][:, :, None, None], (step[token][:, :, None] * x[token])[:, :, :, None] * b[token][:, :, None]
        state[live] = fade * state[live] + added
        size[live] = fade * size[live] + added.abs()
        y[token] = torch.einsum("shpn,shn->shp", state[live], c[token]) + skip[token]
        y_size[token] = torch.einsum("shpn,shn->shp", size[live], c[token].abs()) + skip[token].abs()
        saved = (metadata.save_lengths == taken).nonzero().flatten()
        for store, source in ((states, state), (sizes, size)):
            store[metadata.save_slots[saved]] = source[metadata.save_sequences[saved]]
    states[metadata.slots], sizes[metadata.slots] = state, size
    return (y, y_size), (states, sizes)


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    """NaN equals NaN of the same bits."""
    integers = {2: torch.int16, 4: torch.int32}[left.dtype.itemsize]
    assert torch.equal(left.contiguous().view(integers), right.contiguous().view(integers))
