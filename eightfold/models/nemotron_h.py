"""Nemotron-H: one mixer a layer, by a pattern such as "MEM*-E" (arXiv 2504.03624).

hidden = embedding(tokens)
for each layer:   hidden += mixer(norm(hidden)),   where the mixer is
    M   Mamba2
    *   attention, which sees no positions: the recurrence around it knows the order
    -   an MLP without a gate, down(relu²(up(x)))
    E   experts of that kind, chosen by sigmoid scores with a correction bias, beside a shared one; in Nemotron-3 they may
        work in a latent space
logits = head(norm(hidden))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eightfold.kernels.operations import BatchMetadata, Routing
from eightfold.layers.attention import Attention
from eightfold.layers.caches import CacheLayout, LayerCache
from eightfold.layers.embedding import Embedding, OutputHead
from eightfold.layers.mamba2 import Mamba2
from eightfold.layers.mlp import MLP
from eightfold.layers.module import Module
from eightfold.layers.moe import Experts, MoE, Router
from eightfold.layers.norm import RMSNorm
from eightfold.models.causal_lm import CausalLM
from eightfold.models.mamba_arch import MambaArch


@dataclass(frozen=True, slots=True)
class LatentMixtureArch:
    """Experts of an `E` layer.

    Attributes:
        routing: how they are chosen.
        intermediate_size: width inside one.
        shared_intermediate_size: width inside the shared one.
        latent_size: width of the space that they work in; None for the hidden states'.
    """

    routing: Routing
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None


@dataclass(frozen=True, slots=True)
class NemotronHArch:
    """Everything that building and running a Nemotron-H needs to know of it.

    Attributes:
        pattern: the layers, one of M, *, - and E for each.
        mamba: of the M layers; None where there are none, as the next.
        mixture: of the E layers.
        norm_eps: epsilon of all norms.
        mlp_bias: whether MLPs, shared experts and latent projections have biases.
        attention_bias: whether the projections of attention have.
        state_dtype: dtype that the checkpoint wants for the states of the scan.

    The rest is as in `DecoderArch`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    pattern: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mamba: MambaArch | None
    mixture: LatentMixtureArch | None
    norm_eps: float
    mlp_bias: bool
    attention_bias: bool
    tie_word_embeddings: bool
    context_length: int
    dtype: str | None
    state_dtype: str | None

    @property
    def layout(self) -> CacheLayout:
        """Keys and values for `*`, states for `M`, nothing for the others."""
        attends, recurs = (tuple(kind == wanted for kind in self.pattern) for wanted in "*M")
        if self.mamba is None:
            return CacheLayout(attends, self.num_kv_heads, self.head_dim, recurs)
        return CacheLayout(attends, self.num_kv_heads, self.head_dim, recurs, self.mamba.conv_shape, self.mamba.ssm_shape)


class NemotronHLayer(Module):
    """A norm and a mixer. The residual travels beside the hidden states: its addition and the norm are one operation."""

    def __init__(self, name: str, arch: NemotronHArch, kind: str) -> None:
        self.norm = RMSNorm(f"{name}.norm", arch.hidden_size, arch.norm_eps)
        self.mixer = _mixer(f"{name}.mixer", arch, kind)

    def __call__(
        self, hidden_states: Tensor, residual: Tensor, positions: Tensor, cache: LayerCache, metadata: BatchMetadata
    ) -> tuple[Tensor, Tensor]:
        """(output of the mixer, residual before its addition), each `[T, hidden]`, from the same two of the layer before."""
        normed, residual = self.norm.add(hidden_states, residual)
        match self.mixer, cache.kv, cache.state:
            case Mamba2(), None, state if state is not None and metadata.state is not None:
                return self.mixer(normed, state, metadata.state), residual
            case Attention(), kv, None if kv is not None:
                return self.mixer(normed, positions, None, kv, metadata.attention), residual
            case MLP() | MoE(), None, None:
                return self.mixer(normed), residual
        raise ValueError(f"a {type(self.mixer).__name__} got a cache for another kind of layer")


class NemotronH(CausalLM):
    """A whole model."""

    def __init__(self, arch: NemotronHArch) -> None:
        self.arch: NemotronHArch = arch
        self.embeddings = Embedding("backbone.embeddings", arch.vocab_size, arch.hidden_size)
        self.layers = [NemotronHLayer(f"backbone.layers.{index}", arch, kind) for index, kind in enumerate(arch.pattern)]
        self.norm_f = RMSNorm("backbone.norm_f", arch.hidden_size, arch.norm_eps)
        tied_to = self.embeddings if arch.tie_word_embeddings else None
        self.lm_head = OutputHead("lm_head", arch.vocab_size, arch.hidden_size, tied_to=tied_to)

    def __call__(self, token_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], metadata: BatchMetadata) -> Tensor:
        """Final hidden states `[T, hidden]`."""
        hidden_states = self.embeddings(token_ids)
        residual = hidden_states.new_zeros(hidden_states.shape)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden_states, residual = layer(hidden_states, residual, positions, cache, metadata)
        return self.norm_f.add(hidden_states, residual)[0]


def _mixer(name: str, arch: NemotronHArch, kind: str) -> Mamba2 | Attention | MLP | MoE:
    match kind, arch.mamba, arch.mixture:
        case "M", MambaArch() as mamba, _:
            return Mamba2(name, arch.hidden_size, norm_eps=arch.norm_eps, **mamba.arguments())
        case "*", _, _:
            return Attention(
                name,
                arch.hidden_size,
                num_heads=arch.num_heads,
                num_kv_heads=arch.num_kv_heads,
                head_dim=arch.head_dim,
                scale=arch.head_dim**-0.5,
                sliding_window=None,
                uses_rope=False,
                qkv_bias=arch.attention_bias,
                o_bias=arch.attention_bias,
                qk_norm=None,
                norm_eps=arch.norm_eps,
            )
        case "-", _, _:
            return _mlp(name, arch, arch.intermediate_size)
        case "E", _, LatentMixtureArch() as mixture:
            return _mixture(name, arch, mixture)
    raise ValueError(f"a pattern of M, *, - and E was expected, with what its layers need; got {kind}")


def _mlp(name: str, arch: NemotronHArch, width: int) -> MLP:
    return MLP(name, arch.hidden_size, width, activation="relu2", gated=False, bias=arch.mlp_bias)


def _mixture(name: str, arch: NemotronHArch, mixture: LatentMixtureArch) -> MoE:
    experts = Experts(
        f"{name}.experts",
        mixture.latent_size or arch.hidden_size,
        mixture.intermediate_size,
        num_experts=mixture.routing.num_experts,
        top_k=mixture.routing.top_k,
        activation="relu2",
        gated=False,
    )
    return MoE(
        arch.hidden_size,
        Router(f"{name}.gate", arch.hidden_size, mixture.routing, has_correction_bias=True),
        experts,
        shared=_mlp(f"{name}.shared_experts", arch, mixture.shared_intermediate_size),
        latent=None if mixture.latent_size is None else name,
        latent_bias=arch.mlp_bias,
    )
