"""Experts, recurrences and routing in plain torch: the oracle of fast kernels, and the last resort on any device.

A token, an expert and a head at a time where that is what the formula says. All arithmetic inside an operation is in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from eightfold.kernels.operations import MambaSpec, MoeSpec, Routing, StateMetadata
from eightfold.kernels.registry import Hardware
from eightfold.quant.fp8 import WeightTensor, widen


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    """Experts as they were loaded."""

    w13: WeightTensor
    w2: WeightTensor
    spec: MoeSpec


class ReferenceMoe:
    """The sum over a token's experts of weight * W2 a(W13 x), with one expert dequantized at a time."""

    name = "reference"

    def declines(self, spec: MoeSpec, hardware: Hardware) -> str | None:
        """Takes everything."""
        del spec, hardware
        return None

    def prepare(self, w13: WeightTensor, w2: WeightTensor, spec: MoeSpec) -> ReferenceExperts:
        """Keep both as they are."""
        return ReferenceExperts(w13, w2, spec)

    def run(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, prepared: ReferenceExperts) -> Tensor:
        """See `MoeBackend.run`."""
        said = torch.zeros((*expert_ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)  # [T, top_k, K]
        for expert in expert_ids.unique().tolist():
            tokens, choices = (expert_ids == expert).nonzero(as_tuple=True)
            inner = x[tokens].float() @ _dense(prepared.w13, expert).T
            inner = activate(inner, prepared.spec)
            said[tokens, choices] = inner @ _dense(prepared.w2, expert).T
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for choice in range(expert_ids.shape[1]):
            total += expert_weights[:, choice, None] * said[:, choice]
        return total.to(x.dtype)


class ReferenceMamba:
    """Convolution and recurrence of one sequence after another, the recurrence token by token."""

    name = "reference"

    def declines(self, spec: MambaSpec, hardware: Hardware) -> str | None:
        """Takes everything."""
        del spec, hardware
        return None

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, metadata: StateMetadata, spec: MambaSpec
    ) -> Tensor:
        """See `MambaBackend.conv`."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        remembered = spec.conv_kernel - 1
        for chunk, slot, is_new, saves in sequences_of(metadata):
            state = torch.zeros_like(conv_state[slot]) if is_new else conv_state[slot]
            inputs = torch.cat((state.T.float(), x[chunk].float()))  # [kernel - 1 + length, C]
            length = inputs.shape[0] - remembered
            total = torch.zeros((length, x.shape[1]), dtype=torch.float32, device=x.device)
            for tap in range(spec.conv_kernel):
                total += weight[:, tap].float() * inputs[tap : tap + length]
            if bias is not None:
                total += bias.float()
            out[chunk] = torch.nn.functional.silu(total).to(x.dtype)
            for taken, target in (*saves, (length, slot)):
                conv_state[target] = inputs[taken : taken + remembered].T.to(conv_state.dtype)
        return out

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
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        step = torch.nn.functional.softplus(dt.float() + dt_bias).clamp(*spec.dt_limits)  # [T, H]
        heads = spec.num_heads // spec.num_groups
        for chunk, slot, is_new, saves in sequences_of(metadata):
            state = torch.zeros_like(ssm_state[slot]).float() if is_new else ssm_state[slot].float()  # [H, P, N]
            targets = dict(saves)
            for taken, token in enumerate(range(chunk.start, chunk.stop), start=1):
                inputs = x[token].float()  # [H, P]
                into, outof = (part[token].float().repeat_interleave(heads, dim=0) for part in (b, c))  # [H, N]
                decay = torch.exp(step[token] * a)[:, None, None]
                state = decay * state + (step[token][:, None] * inputs)[:, :, None] * into[:, None, :]
                out[token] = ((state * outof[:, None, :]).sum(dim=-1) + d[:, None] * inputs).to(x.dtype)
                if taken in targets:
                    ssm_state[targets[taken]] = state.to(ssm_state.dtype)
            ssm_state[slot] = state.to(ssm_state.dtype)
        return out


class GeneralProduct:
    """Leaves few tokens to the layer's general product: the end of every row of low-latency candidates."""

    name = "general"
    max_tokens = 0

    def declines(self, spec: object, hardware: Hardware) -> str | None:
        """Takes everything, by doing nothing."""
        del spec, hardware
        return None

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> None:
        """Never called: it takes no product."""
        raise RuntimeError(f"a layer prepares {tuple(weight.shape)} for its general product itself, bias {bias is not None}")

    def run(self, x: Tensor, prepared: None) -> Tensor:
        """Never called: it takes no product."""
        raise RuntimeError(f"a layer runs its general product itself: {tuple(x.shape)}, {prepared}")


def activate(x: Tensor, spec: MoeSpec) -> Tensor:
    """What is between the two products of an expert: `[T, I]` from `[T, 2 I]`, or without a gate from `[T, I]`."""
    if spec.gated:
        x, up = x.chunk(2, dim=-1)
    active = torch.nn.functional.silu(x) if spec.activation == "silu" else x.relu().square()
    return active * up if spec.gated else active


def route(hidden_states: Tensor, gate: Tensor, correction_bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """See `FusedBackend.route`."""
    logits = hidden_states.float() @ gate.float().T
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()  # [T, E]
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if routing.num_groups > 1:
        groups = choice.unflatten(1, (routing.num_groups, -1))  # [T, groups, experts of a group]
        standing = groups.topk(2, dim=-1).values.sum(dim=-1)
        kept = _best(standing, routing.topk_groups)
        is_out = torch.ones_like(standing, dtype=torch.bool).scatter_(1, kept, False)
        choice = groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)
    ids = _best(choice, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if routing.scoring == "sigmoid" else 0.0))
    return ids, weights * routing.scale


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    """See `FusedBackend.gated_rms_norm`."""
    groups: Tensor = (x.float() * torch.nn.functional.silu(gate.float())).unflatten(-1, (-1, group_size))
    normed = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)
    return (normed.flatten(-2) * weight.float()).to(x.dtype)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest of each row, best first; of equal ones the lower index, which `topk` does not promise."""
    indices: Tensor = scores.sort(dim=-1, descending=True, stable=True).indices
    return indices[:, :count]


def _dense(weight: WeightTensor, expert: int) -> Tensor:
    return widen(weight[expert])


def sequences_of(metadata: StateMetadata) -> list[tuple[slice, int, bool, list[tuple[int, int]]]]:
    """For each sequence: its tokens, its slot, whether it starts, and its saves as (tokens taken in, slot)."""
    starts = metadata.query_start.tolist()
    saves: list[list[tuple[int, int]]] = [[] for _ in starts[1:]]
    for sequence, taken, slot in zip(
        metadata.save_sequences.tolist(), metadata.save_lengths.tolist(), metadata.save_slots.tolist(), strict=True
    ):
        saves[sequence].append((taken, slot))
    spans = (slice(start, stop) for start, stop in pairwise(starts))
    return list(zip(spans, metadata.slots.tolist(), metadata.is_new.tolist(), saves, strict=True))
