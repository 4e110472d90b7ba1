"""Every operation in plain torch: the oracle that fast kernels are compared with, and the last resort on any device.

Nothing here is clever. A quantized weight is dequantized whole for each product, attention gathers its context and builds
the score matrix, and all arithmetic inside an operation is in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eightfold.kernels.operations import AttentionMetadata, AttentionSpec, LinearSpec, Routing
from eightfold.kernels.reference_mixers import gated_rms_norm, route
from eightfold.kernels.registry import Hardware
from eightfold.quant.fp8 import WeightTensor, widen


class ReferenceLinear:
    """y = x Wᵀ + b after dequantizing W."""

    name = "reference"

    def declines(self, spec: LinearSpec, hardware: Hardware) -> str | None:
        """Takes everything."""
        del spec, hardware
        return None

    def prepare(self, weight: WeightTensor, bias: Tensor | None) -> tuple[WeightTensor, Tensor | None]:
        """Keep both as they are."""
        return weight, bias

    def run(self, x: Tensor, prepared: tuple[WeightTensor, Tensor | None]) -> Tensor:
        """y `[M, N]` in the dtype of x `[M, K]`, from an fp32 product."""
        weight, bias = prepared
        dense = widen(weight)
        return torch.nn.functional.linear(x.float(), dense, None if bias is None else bias.float()).to(x.dtype)


class ReferenceAttention:
    """softmax(scale * Q Kᵀ + mask) V, one sequence at a time."""

    name = "reference"

    def declines(self, spec: AttentionSpec, hardware: Hardware) -> str | None:
        """Takes everything."""
        del spec, hardware
        return None

    def run(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of each chunk over its gathered context; shapes as in `AttentionBackend.run`."""
        out = torch.empty_like(query)  # [num_tokens, num_heads, head_dim]
        starts = metadata.query_start.tolist()
        for index, context_len in enumerate(metadata.context_lens.tolist()):
            chunk = slice(starts[index], starts[index + 1])
            blocks = metadata.block_tables[index, : -(-context_len // key_cache.shape[1])].long()
            keys = key_cache[blocks].flatten(0, 1)[:context_len].float()  # [context, num_kv_heads, head_dim]
            values = value_cache[blocks].flatten(0, 1)[:context_len].float()
            out[chunk] = _attend(query[chunk].float(), keys, values, spec).to(out.dtype)
        return out.flatten(1)


class ReferenceFused:
    """The small operations, each as its formula."""

    name = "reference"

    def declines(self, spec: torch.dtype, hardware: Hardware) -> str | None:
        """Takes everything."""
        del spec, hardware
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `FusedBackend.rms_norm`."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.add_rms_norm`."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary(self, query: Tensor, key: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.rotary`."""
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2]
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `FusedBackend.silu_and_mul`."""
        gate, up = x.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    def relu2(self, x: Tensor) -> Tensor:
        """See `FusedBackend.relu2`."""
        return x.relu().square()

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
        """See `FusedBackend.gated_rms_norm`."""
        return gated_rms_norm(x, gate, weight, eps, group_size)

    def route(
        self, hidden_states: Tensor, gate: Tensor, correction_bias: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """See `FusedBackend.route`."""
        return route(hidden_states, gate, correction_bias, routing)

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
        """See `FusedBackend.write_kv`."""
        key_cache.flatten(0, 1)[slot_mapping] = key
        value_cache.flatten(0, 1)[slot_mapping] = value


def _attend(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """`[q, num_heads, head_dim]` from queries that are the last q positions of a context of keys and values, in fp32."""
    num_queries, context_len = query.shape[0], keys.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * spec.scale
    key_position = torch.arange(context_len, device=query.device)
    position = key_position[context_len - num_queries :].unsqueeze(1)  # [q, 1]
    hidden = key_position > position
    if spec.sliding_window is not None:
        hidden |= key_position <= position - spec.sliding_window
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_dim of the last dimension, its first half against its second; the rest passes through."""
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
