"""Mamba2's two operations in fp64 loops, and operands for them: what every backend of theirs is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eightfold.kernels.operations import MambaBackend, MambaSpec, StateMetadata

HEADS, NUM_SLOTS = 4, 9
UNLIMITED = (0.0, math.inf)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equality that holds for a NaN as for any other pattern."""
    whole = {2: torch.int16, 4: torch.int32}
    return left.dtype == right.dtype and torch.equal(left.view(whole[left.itemsize]), right.view(whole[right.itemsize]))


def counted_nan(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN everywhere, whose bits tell neighbours apart."""
    counts = torch.arange(math.prod(shape)) % 60 + 1
    bits = (counts + 0x7FC00000).int() if dtype == torch.float32 else (counts + 0x7FC0).short()
    return bits.view(dtype).reshape(shape)


def spec_of(
    num_groups: int = 2,
    *,
    head_dim: int = 3,
    state_size: int = 5,
    kernel: int = 4,
    limits: tuple[float, float] = UNLIMITED,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> MambaSpec:
    return MambaSpec("m", HEADS, head_dim, state_size, num_groups, kernel, limits, dtype, state_dtype)


def metadata(
    lengths: list[int], slots: list[int], *, is_new: list[bool] | bool = True, saves: tuple[tuple[int, int, int], ...] = ()
) -> StateMetadata:
    """Sequences of these lengths at these slots; a save is (sequence, tokens taken in, slot)."""
    new = [is_new] * len(lengths) if isinstance(is_new, bool) else is_new
    columns = torch.tensor(saves, dtype=torch.int64).reshape(-1, 3)
    return StateMetadata(
        slots=torch.tensor(slots),
        is_new=torch.tensor(new),
        query_start=torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
        save_sequences=columns[:, 0],
        save_lengths=columns[:, 1],
        save_slots=columns[:, 2],
        max_query_len=max(lengths),
    )


@dataclass(frozen=True)
class Scan:
    """The operands of a scan, of one or more sequences."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    dt_bias: Tensor

    def run(self, backend: MambaBackend, states: Tensor, where: StateMetadata, spec: MambaSpec) -> Tensor:
        return backend.scan(self.x, self.dt, self.a, self.b, self.c, self.d, self.dt_bias, states, where, spec)

    def tokens(self, part: slice) -> Scan:
        return replace(self, x=self.x[part], dt=self.dt[part], b=self.b[part], c=self.c[part])


def scan_of(length: int, spec: MambaSpec) -> Scan:
    dtype, groups = spec.activation_dtype, (length, spec.num_groups, spec.state_size)
    return Scan(
        x=randn(length, HEADS, spec.head_dim).to(dtype),
        dt=(2 * randn(length, HEADS, seed=1)).to(dtype),
        a=-randn(HEADS, seed=2).exp(),
        b=randn(*groups, seed=3).to(dtype),
        c=randn(*groups, seed=4).to(dtype),
        d=randn(HEADS, seed=5),
        dt_bias=randn(HEADS, seed=6),
    )


def step_size(value: float, limits: tuple[float, float]) -> float:
    """softplus between the limits, without the overflow and the cancellation of its formula."""
    return min(max(max(value, 0.0) + math.log1p(math.exp(-abs(value))), limits[0]), limits[1])


@dataclass(frozen=True)
class Recurrence:
    """What a scan of one sequence should give in fp64, and the sums of magnitudes behind it.

    Attributes:
        y: `[T, H, P]`.
        y_magnitude: like `y`.
        state: `[H, P, N]`, after the last token.
        state_magnitude: like `state`.
    """

    y: Tensor
    y_magnitude: Tensor
    state: Tensor
    state_magnitude: Tensor


def recurrence(scan: Scan, spec: MambaSpec, state: Tensor) -> Recurrence:
    """One token and one head at a time."""
    state, behind = state.double().clone(), state.double().abs()
    x, b, c = scan.x.double(), scan.b.double(), scan.c.double()
    y, y_behind = torch.zeros_like(x), torch.zeros_like(x)
    for token in range(len(x)):
        for head in range(HEADS):
            group = head // (HEADS // spec.num_groups)
            step = step_size(float(scan.dt[token, head].double() + scan.dt_bias[head].double()), spec.dt_limits)
            decay = math.exp(step * float(scan.a[head]))
            update = step * torch.outer(x[token, head], b[token, group])
            state[head] = decay * state[head] + update
            behind[head] = decay * behind[head] + update.abs()
            skip = float(scan.d[head]) * x[token, head]
            y[token, head] = state[head] @ c[token, group] + skip
            y_behind[token, head] = behind[head] @ c[token, group].abs() + skip.abs()
    return Recurrence(y, y_behind, state, behind)


def filters(channels: int, kernel: int, dtype: torch.dtype, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Weight `[C, kernel]` and bias `[C]` of a convolution."""
    return randn(channels, kernel, seed=1).to(dtype), randn(channels, seed=2).to(dtype) if has_bias else None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> tuple[Tensor, Tensor]:
    """silu of the convolution of x `[T, C]` behind the inputs `before` `[C, kernel - 1]`, and a magnitude, in fp64."""
    inputs = torch.cat((before.T, x)).double()
    shift = torch.zeros(x.shape[1]).double() if bias is None else bias.double()
    sums, magnitude = shift.repeat(len(x), 1), shift.abs().repeat(len(x), 1)
    for token in range(len(x)):
        for tap in range(weight.shape[1]):
            term = weight[:, tap].double() * inputs[token + tap]
            sums[token] += term
            magnitude[token] += term.abs()
    return sums / (1 + torch.exp(-sums)), magnitude


@dataclass(frozen=True)
class Mixer:
    """The recurrent part of a layer: a convolution, and the scan of views of what it gives."""

    backend: MambaBackend
    spec: MambaSpec

    @property
    def channels(self) -> int:
        return HEADS * self.spec.head_dim + 2 * self.spec.num_groups * self.spec.state_size

    def states(self) -> tuple[Tensor, Tensor]:
        """The states of the convolution and of the scan, nothing written yet."""
        spec = self.spec
        return (
            counted_nan((NUM_SLOTS, self.channels, spec.conv_kernel - 1), spec.activation_dtype),
            counted_nan((NUM_SLOTS, HEADS, spec.head_dim, spec.state_size), spec.state_dtype),
        )

    def tokens(self, length: int, *, seed: int = 0) -> Tensor:
        """What a projection would give: `[T, channels + H]`."""
        return randn(length, self.channels + HEADS, seed=seed).to(self.spec.activation_dtype)

    def run(
        self,
        tokens: Tensor,
        states: tuple[Tensor, Tensor],
        where: StateMetadata,
        view: Callable[[Tensor], Tensor] = lambda operand: operand,
    ) -> Tensor:
        """Outputs of both `[T, channels + H * P]`; `view` gets each operand that is a view of a wider tensor."""
        spec, inner = self.spec, HEADS * self.spec.head_dim
        shared = spec.num_groups * spec.state_size
        weight, bias = filters(self.channels, spec.conv_kernel, spec.activation_dtype, has_bias=True)
        convolved = self.backend.conv(view(tokens[:, : self.channels]), weight, bias, states[0], where, spec)
        x, b, c = convolved.split((inner, shared, shared), dim=1)
        scan = replace(
            scan_of(1, spec),
            x=view(x.unflatten(1, (HEADS, -1))),
            dt=view(tokens[:, self.channels :]),
            b=view(b.unflatten(1, (spec.num_groups, -1))),
            c=view(c.unflatten(1, (spec.num_groups, -1))),
        )
        return torch.cat((convolved, scan.run(self.backend, states[1], where, spec).flatten(1)), dim=1)

    def alone(self, tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs of a new sequence, and its two states."""
        states = self.states()
        out = self.run(tokens, states, metadata([len(tokens)], [4]))
        return out, (states[0][4], states[1][4])
