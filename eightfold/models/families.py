"""What Llama-like model types have of their own: one row for each.

A row has the defaults that transformers' own configuration class has for the keys that a `config.json` leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from eightfold.layers.attention import QKNorm


@dataclass(frozen=True, slots=True)
class MixtureFamily:
    """What the experts of one model type are like.

    Attributes:
        num_experts: default of `num_experts`, which some spell `num_local_experts`.
        top_k: default of `num_experts_per_tok`.
        width_key: the key of an expert's inner width.
        width: its default; None where the key must be there.
        normalizes: whether a token's weights are made to sum to one; None reads `norm_topk_prob`, which is false by default.
        shared_width: default of `shared_expert_intermediate_size`; None where there is no shared expert.
        may_have_dense_layers: whether `decoder_sparse_step` and `mlp_only_layers` say which layers have experts.
    """

    num_experts: int
    top_k: int
    width_key: str
    width: int | None = None
    normalizes: bool | None = None
    shared_width: int | None = None
    may_have_dense_layers: bool = False


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """What one model type has of its own.

    Attributes:
        max_position_embeddings: default of the key; so are the next five.
        num_key_value_heads: None stands for as many as query heads.
        head_dim: None stands for hidden_size / num_attention_heads.
        rope_theta: base of the rotation.
        tie_word_embeddings: whether the head is the embedding.
        sliding_window: the window of layers that slide.
        slides: which layers have the window, where `layer_types` does not say: none, all, those from `max_window_layers` on, or
            those without rotation. The latter two slide only with `use_sliding_window`.
        reads: keys of `CHANGES_RESULTS` that this type has a meaning for.
        qkv_bias: whether queries, keys and values have biases without any key that says so.
        qk_norm: the norm that queries and keys pass.
        rms_norm_eps: default of the key.
        mixture: what its experts are like, where it has some.
    """

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    slides: Literal["none", "all", "late", "unrotated"] = "none"
    reads: frozenset[str] = frozenset()
    qkv_bias: bool = False
    qk_norm: QKNorm | None = None
    rms_norm_eps: float = 1e-6
    mixture: MixtureFamily | None = None


_COUNTS_EXPERTS = frozenset({"num_experts", "num_local_experts"})

# SmolLM2 is of type llama.
DECODER_FAMILIES: Mapping[str, DecoderFamily] = MappingProxyType(
    {
        "llama": DecoderFamily(2048, reads=frozenset({"attention_bias", "mlp_bias"})),
        "mistral": DecoderFamily(131072, num_key_value_heads=8, sliding_window=4096, slides="all"),
        "qwen2": DecoderFamily(
            32768,
            num_key_value_heads=32,
            sliding_window=4096,
            slides="late",
            reads=frozenset({"use_sliding_window"}),
            qkv_bias=True,
        ),
        "qwen3": DecoderFamily(
            32768,
            num_key_value_heads=32,
            head_dim=128,
            sliding_window=4096,
            slides="late",
            reads=frozenset({"attention_bias", "use_sliding_window"}),
            qk_norm="head",
        ),
        "smollm3": DecoderFamily(
            32768,
            num_key_value_heads=4,
            rope_theta=2_000_000.0,
            tie_word_embeddings=True,
            slides="unrotated",
            reads=frozenset({"attention_bias", "mlp_bias", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"}),
        ),
        "mixtral": DecoderFamily(
            131072,
            num_key_value_heads=8,
            rope_theta=1_000_000.0,
            slides="all",
            rms_norm_eps=1e-5,
            reads=_COUNTS_EXPERTS,
            mixture=MixtureFamily(num_experts=8, top_k=2, width_key="intermediate_size", normalizes=True),
        ),
        "qwen2_moe": DecoderFamily(
            32768,
            num_key_value_heads=16,
            sliding_window=4096,
            slides="late",
            reads=_COUNTS_EXPERTS | {"use_sliding_window", "qkv_bias"},
            qkv_bias=True,
            mixture=MixtureFamily(
                num_experts=60,
                top_k=4,
                width_key="moe_intermediate_size",
                width=1408,
                shared_width=5632,
                may_have_dense_layers=True,
            ),
        ),
        "qwen3_moe": DecoderFamily(
            32768,
            num_key_value_heads=4,
            reads=_COUNTS_EXPERTS | {"attention_bias"},
            qk_norm="head",
            mixture=MixtureFamily(
                num_experts=128, top_k=8, width_key="moe_intermediate_size", width=768, may_have_dense_layers=True
            ),
        ),
        "olmoe": DecoderFamily(
            4096,
            rms_norm_eps=1e-5,
            reads=_COUNTS_EXPERTS | {"attention_bias"},
            qk_norm="whole",
            mixture=MixtureFamily(num_experts=64, top_k=8, width_key="intermediate_size"),
        ),
    }
)

# Keys by which relatives of these families compute something else, and the values with which they do not.
CHANGES_RESULTS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_cross_attention": (None, False),
        "alibi": (None, False),
        "attention_bias": (None, False),
        "attention_chunk_size": (None,),
        "attention_multiplier": (None,),
        "attn_logit_softcapping": (None,),
        "attn_temperature_tuning": (None, False, 0),
        "clip_qkv": (None,),
        "compression_config": (None, {}),
        "embedding_multiplier": (None, 1),
        "final_logit_softcapping": (None,),
        "is_encoder_decoder": (None, False),
        "logit_scale": (None, 1),
        "logits_scaling": (None, 1),
        "mlp_bias": (None, False),
        "n_routed_experts": (None, 0),
        "no_rope_layer_interval": (None,),
        "no_rope_layers": (None,),
        "num_experts": (None, 0),
        "num_local_experts": (None, 0),
        "per_layer_config": (None, {}),
        "pretraining_tp": (None, 1),
        "qk_layernorm": (None, False),
        "query_pre_attn_scalar": (None,),
        "residual_multiplier": (None, 1),
        "rope_interleave": (None, False),
        "scale_depth": (None,),
        "scale_emb": (None, 1),
        "use_parallel_residual": (None, False),
        "use_qk_norm": (None, False),
        "use_sliding_window": (None, False),
    }
)
