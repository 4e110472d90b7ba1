"""Grouped-query attention over the paged cache, with its four projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from torch import Tensor

from eightfold.kernels.operations import AttentionBackend, AttentionMetadata, AttentionSpec, FusedBackend
from eightfold.kernels.selection import Kernels
from eightfold.layers.caches import KVCache
from eightfold.layers.linear import Linear
from eightfold.layers.module import Chosen, FormatOf, Module
from eightfold.layers.norm import RMSNorm

QKNorm: TypeAlias = Literal["head", "whole"]
"""What an RMS norm of queries and keys runs over: each head, or all heads of a token together."""


class Attention(Module):
    """softmax(scale * Q Kᵀ) V for queries, keys and values projected from the hidden states.

    Args:
        name: the layer's name in the checkpoint, such as "model.layers.0.self_attn".
        hidden_size: width of the hidden states.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        scale: factor on the scores.
        sliding_window: how far back a token sees; None is all the way.
        uses_rope: whether queries and keys are rotated by position.
        qkv_bias: whether q, k and v have biases.
        o_bias: whether the output projection has one.
        qk_norm: which norm queries and keys pass before the rotation; None where there is none.
        norm_eps: its epsilon.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None,
        uses_rope: bool,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: QKNorm | None,
        norm_eps: float,
    ) -> None:
        self.name, self.qk_norm = name, qk_norm
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale, self.sliding_window, self.uses_rope = scale, sliding_window, uses_rope
        self.q_size, self.kv_size = num_heads * head_dim, num_kv_heads * head_dim
        parts = {f"{name}.q_proj": self.q_size, f"{name}.k_proj": self.kv_size, f"{name}.v_proj": self.kv_size}
        self.qkv_proj = Linear(f"{name}.qkv_proj", hidden_size, parts, bias=qkv_bias)
        q_width, k_width = (head_dim, head_dim) if qk_norm == "head" else (self.q_size, self.kv_size)
        self.q_norm = None if qk_norm is None else RMSNorm(f"{name}.q_norm", q_width, norm_eps)
        self.k_norm = None if qk_norm is None else RMSNorm(f"{name}.k_norm", k_width, norm_eps)
        self.o_proj = Linear(f"{name}.o_proj", self.q_size, {f"{name}.o_proj": hidden_size}, bias=o_bias)
        self._spec: AttentionSpec
        self._attention: AttentionBackend
        self._fused: FusedBackend

    def choose(self, kernels: Kernels, format_of: FormatOf) -> Iterator[Chosen]:
        """The backend of attention itself."""
        del format_of
        yield Chosen("attention", self.name, kernels.attention(self._make_spec(kernels)))

    def bind(self, kernels: Kernels) -> None:
        """Choose the backends."""
        super().bind(kernels)
        self._spec = self._make_spec(kernels)
        self.chosen = (Chosen("attention", self.name, kernels.attention(self._spec)),)
        self._attention = self.chosen[0].choice.backend
        self._fused = kernels.fused().backend

    def __call__(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """`[T, hidden]` from hidden states `[T, hidden]`; writes this batch's keys and values into the cache."""
        heads = self.qkv_proj(hidden_states).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self._normed(query, self.q_norm), self._normed(key, self.k_norm)
        if cos_sin is not None and self.uses_rope:
            query, key = self._fused.rotary(query, key, cos_sin, positions)
        self._fused.write_kv(key, value, *kv_cache, metadata.slot_mapping)
        return self.o_proj(self._attention.run(query, *kv_cache, metadata, self._spec))

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Queries or keys `[T, heads, head_dim]`, normed by the head or over all heads of a token."""
        return norm(x) if self.qk_norm == "head" else norm(x.flatten(1)).view_as(x)

    def _make_spec(self, kernels: Kernels) -> AttentionSpec:
        return AttentionSpec(
            self.num_heads, self.num_kv_heads, self.head_dim, self.scale, self.sliding_window, kernels.activation_dtype
        )
