"""Mamba2 in torch's own products, on any device: many tokens or many sequences at once, where the reference takes one.

A sequence is cut into chunks. Inside a chunk that starts from the state S, with steps dt and l_i = sum over k <= i of
dt_k * a, all heads side by side, the recurrence unrolls into three products (arXiv 2405.21060, section 6):

    y_i = exp(l_i) S c_i + sum over j <= i of exp(l_i - l_j) dt_j (c_i . b_j) x_j + d x_i
    S'  = exp(l_last) S  + sum over j of exp(l_last - l_j) dt_j x_j b_jᵀ

All of it is in fp32. A chunk also ends wherever a state is to be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from eightfold.kernels.operations import MambaSpec, StateMetadata
from eightfold.kernels.reference_mixers import ReferenceMamba, sequences_of
from eightfold.kernels.registry import Hardware

CHUNK = 64
"""Tokens of a chunk: the work inside a chunk grows with its square, the number of small products falls with it."""


class ChunkedMamba:
    """Convolution and recurrence, a chunk of a sequence or one token of all sequences at a time."""

    name = "chunked"

    def __init__(self) -> None:
        self._by_sequence = ReferenceMamba()

    def declines(self, spec: MambaSpec, hardware: Hardware) -> str | None:
        """Takes everything."""
        del spec, hardware
        return None

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, metadata: StateMetadata, spec: MambaSpec
    ) -> Tensor:
        """See `MambaBackend.conv`."""
        if metadata.max_query_len > 1:
            return self._by_sequence.conv(x, weight, bias, conv_state, metadata, spec)
        before = _read(conv_state, metadata)  # [S, C, kernel - 1]
        inputs = torch.cat((before, x.unsqueeze(-1).float()), dim=-1)
        total = (inputs * weight.float()).sum(dim=-1)
        if bias is not None:
            total += bias.float()
        _write(conv_state, inputs[..., 1:], metadata)
        return torch.nn.functional.silu(total).to(x.dtype)

    def scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        ssm_state: Tensor,
        metadata: StateMetadata,
        spec: MambaSpec,
    ) -> Tensor:
        """See `MambaBackend.scan`."""
        heads = spec.num_heads // spec.num_groups
        step = torch.nn.functional.softplus(dt.float() + dt_bias).clamp(*spec.dt_limits)  # [T, H]
        inputs = x.float()
        into, outof = (part.float() for part in (b, c))  # [T, G, N]
        if metadata.max_query_len == 1:
            state = _read(ssm_state, metadata)  # [S, H, P, N]
            state *= torch.exp(step * a)[:, :, None, None]
            state += (step[:, :, None] * inputs).unsqueeze(-1) * into.repeat_interleave(heads, dim=1).unsqueeze(2)
            said = (state @ outof.repeat_interleave(heads, dim=1).unsqueeze(-1)).squeeze(-1)
            _write(ssm_state, state, metadata)
            return (said + d[:, None] * inputs).to(x.dtype)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for tokens, slot, is_new, saves in sequences_of(metadata):
            state = torch.zeros_like(ssm_state[slot]).float() if is_new else ssm_state[slot].float()  # [H, P, N]
            targets = dict(saves)
            for begin, end in pairwise(_cuts(tokens.stop - tokens.start, [taken for taken, _ in saves])):
                part = slice(tokens.start + begin, tokens.start + end)
                said, state = _advance(state, inputs[part], step[part], a, into[part], outof[part], heads)
                out[part] = (said + d[:, None] * inputs[part]).to(x.dtype)
                if end in targets:
                    ssm_state[targets[end]] = state.to(ssm_state.dtype)
            ssm_state[slot] = state.to(ssm_state.dtype)
        return out


def _advance(state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """One chunk of one sequence, all in fp32.

    Args:
        state: `[H, P, N]` before it.
        x: `[L, H, P]`.
        step: `[L, H]`.
        a: `[H]`.
        b: `[L, G, N]`.
        c: `[L, G, N]`.
        heads: heads of a group.

    Returns:
        y without the skip `[L, H, P]`, and the state after the chunk.
    """
    decay = (step * a).cumsum(dim=0).T  # l, [H, L]
    between = (decay[:, :, None] - decay[:, None, :]).tril().exp().tril()  # exp(l_i - l_j) for j <= i, [H, L, L]
    alike = torch.einsum("ign,jgn->gij", c, b).repeat_interleave(heads, dim=0)  # c_i . b_j, [H, L, L]
    weighted = (step[:, :, None] * x).transpose(0, 1)  # dt_j x_j, [H, L, P]
    outof, into = (part.transpose(0, 1).repeat_interleave(heads, dim=0) for part in (c, b))  # [H, L, N]
    said = (alike * between) @ weighted + decay.exp()[:, :, None] * (outof @ state.transpose(1, 2))
    left = (decay[:, -1:] - decay).exp()[:, :, None] * weighted
    return said.transpose(0, 1), decay[:, -1].exp()[:, None, None] * state + left.transpose(1, 2) @ into


def _cuts(length: int, saves: Sequence[int]) -> list[int]:
    return sorted({0, length, *range(0, length, CHUNK), *saves})


def _read(states: Tensor, metadata: StateMetadata) -> Tensor:
    """The state of each sequence in fp32, zeros where it starts. What a slot holds then is of no meaning, NaN included."""
    return torch.where(metadata.is_new.view(-1, *[1] * (states.ndim - 1)), 0.0, states[metadata.slots].float())


def _write(states: Tensor, values: Tensor, metadata: StateMetadata) -> None:
    """Store the states after one token of each sequence, and save those that are to be saved."""
    kept = values.to(states.dtype)
    states[metadata.slots] = kept
    states[metadata.save_slots] = kept[metadata.save_sequences]
