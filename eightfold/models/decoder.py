"""Llama-like decoders, dense and with experts: Llama, Mistral, Qwen, SmolLM, Mixtral, OLMoE. `DecoderArch` has what differs.

    hidden = embedding(tokens)
    for each layer:   hidden += attention(norm(hidden));   hidden += mlp(norm(hidden))
    logits = head(norm(hidden))

where mlp(x) = down(silu(gate(x)) * up(x)), or the weighted sum of such experts that a router chooses for each token.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eightfold.kernels.operations import BatchMetadata
from eightfold.kernels.selection import Kernels
from eightfold.layers.attention import Attention
from eightfold.layers.caches import LayerCache
from eightfold.layers.embedding import Embedding, OutputHead
from eightfold.layers.mlp import MLP
from eightfold.layers.module import Module
from eightfold.layers.moe import Experts, MoE, Router
from eightfold.layers.norm import RMSNorm
from eightfold.layers.rotary import rotary_table
from eightfold.models.arch import DecoderArch, LayerArch, MixtureArch
from eightfold.models.causal_lm import CausalLM


class DecoderLayer(Module):
    """One block: attention, then an MLP or experts, each after a norm. The residual travels beside the hidden states, so that
    its addition and the next norm are one operation.
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
            qk_norm=arch.qk_norm,
            norm_eps=arch.rms_norm_eps,
        )
        self.post_attention_layernorm = RMSNorm(f"{name}.post_attention_layernorm", arch.hidden_size, arch.rms_norm_eps)
        if layer.mixture is None:
            self.mlp: MLP | MoE = _mlp(f"{name}.mlp", arch, arch.intermediate_size)
        else:
            self.mlp = _mixture(f"{name}.mlp", arch, layer.mixture)

    def __call__(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        cache: LayerCache,
        metadata: BatchMetadata,
    ) -> tuple[Tensor, Tensor]:
        """(output of the MLP, residual before its addition), each `[T, hidden]`, from the same two of the layer before."""
        if cache.kv is None:
            raise ValueError(f"{self.self_attn.name} needs a cache of keys and values")
        normed, residual = self.input_layernorm.add(hidden_states, residual)
        attended = self.self_attn(normed, positions, cos_sin, cache.kv, metadata.attention)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual


class Decoder(CausalLM):
    """A whole model."""

    def __init__(self, arch: DecoderArch) -> None:
        self.arch: DecoderArch = arch
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

    def __call__(self, token_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], metadata: BatchMetadata) -> Tensor:
        """Final hidden states `[T, hidden]`."""
        hidden_states = self.embed_tokens(token_ids)
        residual = hidden_states.new_zeros(hidden_states.shape)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden_states, residual = layer(hidden_states, residual, positions, self._cos_sin, cache, metadata)
        return self.norm.add(hidden_states, residual)[0]


def _mlp(name: str, arch: DecoderArch, width: int) -> MLP:
    return MLP(name, arch.hidden_size, width, activation=arch.activation, gated=True, bias=arch.mlp_bias)


def _mixture(name: str, arch: DecoderArch, mixture: MixtureArch) -> MoE:
    router = Router(f"{name}.gate", arch.hidden_size, mixture.routing, has_correction_bias=False)
    experts = Experts(
        f"{name}.experts",
        arch.hidden_size,
        mixture.intermediate_size,
        num_experts=mixture.routing.num_experts,
        top_k=mixture.routing.top_k,
        activation=arch.activation,
        gated=True,
    )
    if mixture.shared_intermediate_size is None:
        return MoE(arch.hidden_size, router, experts)
    shared = _mlp(f"{name}.shared_expert", arch, mixture.shared_intermediate_size)
    return MoE(arch.hidden_size, router, experts, shared=shared, shared_gate=f"{name}.shared_expert_gate")
