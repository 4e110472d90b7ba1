"""Granite 4 hybrids: Mamba2 or attention in each layer, then an MLP, with experts beside it in the larger ones.

    hidden = embedding_multiplier * embedding(tokens)
    for each layer:   hidden += m * mixer(norm(hidden));   hidden += m * (mlp(norm(hidden)) + experts(norm(hidden)))
    logits = head(norm(hidden)) / logits_scaling

with m the residual multiplier; attention scales its scores by a multiplier of its own, and may have no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eightfold.kernels.operations import BatchMetadata
from eightfold.kernels.selection import Kernels
from eightfold.layers.attention import Attention
from eightfold.layers.caches import CacheLayout, LayerCache
from eightfold.layers.embedding import Embedding, OutputHead
from eightfold.layers.mamba2 import Mamba2
from eightfold.layers.mlp import MLP
from eightfold.layers.module import Module
from eightfold.layers.moe import Experts, MoE, Router
from eightfold.layers.norm import RMSNorm
from eightfold.layers.rotary import RopeConfig, rotary_table
from eightfold.models.arch import MixtureArch
from eightfold.models.causal_lm import CausalLM
from eightfold.models.mamba_arch import MambaArch


@dataclass(frozen=True, slots=True)
class GraniteHybridArch:
    """Everything that building and running a Granite hybrid needs to know of it.

    Attributes:
        attends: for each layer, whether it is attention; else it is Mamba2.
        attention_scale: factor on the scores.
        rope: how positions become rotations; None where they do not.
        mamba: of the Mamba2 layers.
        mixture: the experts beside the MLP of every layer; None where there are none.
        shared_intermediate_size: width inside the MLP.
        embedding_multiplier: factor on embeddings.
        residual_multiplier: factor on what each half of a layer adds.
        logits_scaling: divisor of logits.

    The rest is as in `DecoderArch`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    attends: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    attention_bias: bool
    rope: RopeConfig | None
    mamba: MambaArch
    mixture: MixtureArch | None
    shared_intermediate_size: int
    rms_norm_eps: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    tie_word_embeddings: bool
    context_length: int
    dtype: str | None
    state_dtype: str | None = None

    @property
    def layout(self) -> CacheLayout:
        """Keys and values for layers that attend, states for the others."""
        recurs = tuple(not attends for attends in self.attends)
        return CacheLayout(self.attends, self.num_kv_heads, self.head_dim, recurs, self.mamba.conv_shape, self.mamba.ssm_shape)


class GraniteHybridLayer(Module):
    """A mixer and an MLP, each after a norm. The residual travels beside the hidden states."""

    def __init__(self, name: str, arch: GraniteHybridArch, *, attends: bool) -> None:
        self._multiplier = arch.residual_multiplier
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm", arch.hidden_size, arch.rms_norm_eps)
        self.mixer: Attention | Mamba2 = _attention(name, arch) if attends else _mamba(name, arch)
        self.post_attention_layernorm = RMSNorm(f"{name}.post_attention_layernorm", arch.hidden_size, arch.rms_norm_eps)
        self.mlp = _mlp(name, arch)

    def __call__(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: LayerCache,
        metadata: BatchMetadata,
    ) -> tuple[Tensor, Tensor]:
        """(output of the MLP, residual before its addition), each `[T, hidden]`, from the same two of the layer before."""
        normed, residual = self.input_layernorm.add(hidden_states, residual)
        match self.mixer, cache.kv, cache.state:
            case Mamba2(), None, state if state is not None and metadata.state is not None:
                mixed = self.mixer(normed, state, metadata.state)
            case Attention(), kv, None if kv is not None:
                mixed = self.mixer(normed, positions, cos_sin, kv, metadata.attention)
            case _:
                raise ValueError(f"a {type(self.mixer).__name__} got a cache for another kind of layer")
        normed, residual = self.post_attention_layernorm.add(mixed * self._multiplier, residual)
        return self.mlp(normed) * self._multiplier, residual


class GraniteHybrid(CausalLM):
    """A whole model."""

    def __init__(self, arch: GraniteHybridArch) -> None:
        self.arch: GraniteHybridArch = arch
        self.embed_tokens = Embedding("model.embed_tokens", arch.vocab_size, arch.hidden_size)
        self.layers = [
            GraniteHybridLayer(f"model.layers.{index}", arch, attends=attends) for index, attends in enumerate(arch.attends)
        ]
        self.norm = RMSNorm("model.norm", arch.hidden_size, arch.rms_norm_eps)
        tied_to = self.embed_tokens if arch.tie_word_embeddings else None
        self.lm_head = OutputHead("lm_head", arch.vocab_size, arch.hidden_size, tied_to=tied_to)
        self._cos_sin: Tensor | None = None

    def bind(self, kernels: Kernels) -> None:
        """Take weights and backends, and make the table of rotations where there are any."""
        super().bind(kernels)
        if self.arch.rope is not None:
            self._cos_sin = rotary_table(self.arch.rope, self.arch.context_length).to(kernels.hardware.device)

    def __call__(self, token_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], metadata: BatchMetadata) -> Tensor:
        """Final hidden states `[T, hidden]`."""
        hidden_states = self.embed_tokens(token_ids) * self.arch.embedding_multiplier
        residual = hidden_states.new_zeros(hidden_states.shape)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden_states, residual = layer(hidden_states, residual, positions, self._cos_sin, cache, metadata)
        return self.norm.add(hidden_states, residual)[0]

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, vocab_size]` from final hidden states `[T, hidden]`."""
        return self.lm_head(hidden_states) / self.arch.logits_scaling


def _attention(name: str, arch: GraniteHybridArch) -> Attention:
    return Attention(
        f"{name}.self_attn",
        arch.hidden_size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        scale=arch.attention_scale,
        sliding_window=None,
        uses_rope=arch.rope is not None,
        qkv_bias=arch.attention_bias,
        o_bias=arch.attention_bias,
        qk_norm=None,
        norm_eps=arch.rms_norm_eps,
    )


def _mamba(name: str, arch: GraniteHybridArch) -> Mamba2:
    return Mamba2(f"{name}.mamba", arch.hidden_size, norm_eps=arch.rms_norm_eps, **arch.mamba.arguments())


def _mlp(name: str, arch: GraniteHybridArch) -> MLP | MoE:
    width = arch.shared_intermediate_size
    shared = MLP(f"{name}.shared_mlp", arch.hidden_size, width, activation="silu", gated=True, fused=True)
    if arch.mixture is None:
        return shared
    routing, name = arch.mixture.routing, f"{name}.block_sparse_moe"
    experts = Experts(
        f"{name}.experts",
        arch.hidden_size,
        arch.mixture.intermediate_size,
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        activation="silu",
        gated=True,
    )
    router = Router(f"{name}.router", arch.hidden_size, routing, has_correction_bias=False)
    return MoE(arch.hidden_size, router, experts, shared=shared)
