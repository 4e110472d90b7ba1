"""Llama-like decoders: Llama, Mistral, Qwen2, Qwen3, SmolLM2 and SmolLM3. What differs between them is data in `DecoderArch`.

    hidden = embedding(tokens)
    for each layer:   hidden += attention(norm(hidden));   hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
    logits = head(norm(hidden))

A decoder runs on explicit arguments alone: token ids and positions, a pair of cache tensors for each layer, and the metadata
that says where in them the tokens of each sequence lie.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eightfold.kernels.operations import AttentionMetadata, FusedBackend
from eightfold.kernels.selection import Kernels
from eightfold.layers.attention import Attention, KVCache
from eightfold.layers.embedding import Embedding, OutputHead
from eightfold.layers.linear import Linear
from eightfold.layers.module import Module
from eightfold.layers.norm import RMSNorm
from eightfold.layers.rotary import rotary_table
from eightfold.models.arch import DecoderArch, LayerArch


class MLP(Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, name: str, arch: DecoderArch) -> None:
        width = arch.intermediate_size
        parts = {f"{name}.gate_proj": width, f"{name}.up_proj": width}
        self.gate_up_proj = Linear(f"{name}.gate_up_proj", arch.hidden_size, parts, bias=arch.mlp_bias)
        self.down_proj = Linear(f"{name}.down_proj", width, {f"{name}.down_proj": arch.hidden_size}, bias=arch.mlp_bias)
        self._fused: FusedBackend

    def bind(self, kernels: Kernels) -> None:
        """Take the backends."""
        super().bind(kernels)
        self._fused = kernels.fused().backend

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """`[T, hidden]` from `[T, hidden]`."""
        return self.down_proj(self._fused.silu_and_mul(self.gate_up_proj(hidden_states)))


class DecoderLayer(Module):
    """One block: attention and MLP, each after a norm. The residual travels beside the hidden states, so that its addition
    and the next norm are one operation.
    """

    def __init__(self, name: str, arch: DecoderArch, layer: LayerArch) -> None:
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = Attention(
            f"{name}.self_attn",
            arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            scale=arch.attention_scale,
            sliding_window=layer.sliding_window,
            uses_rope=layer.uses_rope,
            qkv_bias=arch.attention_bias_qkv,
            o_bias=arch.attention_bias_o,
            qk_norm_eps=arch.rms_norm_eps if arch.qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(f"{name}.post_attention_layernorm", arch.hidden_size, arch.rms_norm_eps)
        self.mlp = MLP(f"{name}.mlp", arch)

    def __call__(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """(what the MLP adds, residual), each `[T, hidden]`, from the same two of the layer before."""
        normed, residual = self.input_layernorm.add(hidden_states, residual)
        attended = self.self_attn(normed, positions, cos_sin, kv_cache, metadata)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual


class Decoder(Module):
    """A whole model. Fill its weights, then `bind()`, then call it."""

    def __init__(self, arch: DecoderArch) -> None:
        self.arch = arch
        self.embed_tokens = Embedding("model.embed_tokens", arch.vocab_size, arch.hidden_size)
        self.layers = [DecoderLayer(f"model.layers.{index}", arch, layer) for index, layer in enumerate(arch.layers)]
        self.norm = RMSNorm("model.norm", arch.hidden_size, arch.rms_norm_eps)
        tied_to = self.embed_tokens if arch.tie_word_embeddings else None
        self.lm_head = OutputHead("lm_head", arch.vocab_size, arch.hidden_size, tied_to=tied_to)
        self._cos_sin: Tensor

    def bind(self, kernels: Kernels) -> None:
        """Take weights and backends, and make the table of rotations."""
        super().bind(kernels)
        self._cos_sin = rotary_table(self.arch.rope, self.arch.context_length).to(kernels.hardware.device)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata
    ) -> Tensor:
        """Final hidden states `[T, hidden]`.

        Args:
            token_ids: `int64 [T]`, the chunks of all sequences one after another.
            positions: `int64 [T]`, the position of each token in its sequence.
            kv_caches: a pair of caches for each layer; this batch's keys and values are written into them.
            metadata: where the sequences lie in the batch and in the caches.
        """
        hidden_states = self.embed_tokens(token_ids)
        residual = hidden_states.new_zeros(hidden_states.shape)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden_states, residual = layer(hidden_states, residual, positions, self._cos_sin, kv_cache, metadata)
        return self.norm.add(hidden_states, residual)[0]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, vocab_size]` from final hidden states `[T, hidden]`."""
        return self.lm_head(hidden_states)
