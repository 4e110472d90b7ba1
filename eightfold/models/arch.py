"""The architecture of a Llama-like decoder, normalised from a Hugging Face `config.json`.

Families are data: a row of `DECODER_FAMILIES` for each model type says what differs. Whatever would change the numbers and is
not computed here is refused by the name of its key. Keys that cannot change them (token ids, dropout, initialisation, training)
are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from eightfold.kernels.operations import Routing
from eightfold.layers.attention import QKNorm
from eightfold.layers.caches import CacheLayout
from eightfold.layers.rotary import RopeConfig
from eightfold.models.families import CHANGES_RESULTS, DECODER_FAMILIES, DecoderFamily, MixtureFamily
from eightfold.models.hf_config import ConfigReader
from eightfold.models.rope import context_length, read_rope


@dataclass(frozen=True, slots=True)
class MixtureArch:
    """The experts of a layer.

    Attributes:
        routing: how they are chosen.
        intermediate_size: width inside one.
        shared_intermediate_size: width inside the expert that every token uses; None where there is none.
    """

    routing: Routing
    intermediate_size: int
    shared_intermediate_size: int | None


@dataclass(frozen=True, slots=True)
class LayerArch:
    """What may differ from layer to layer.

    Attributes:
        uses_rope: whether queries and keys are rotated by position.
        sliding_window: a query at position p sees keys p - window + 1 .. p; None sees all keys up to p.
        mixture: its experts; None where it has an MLP.
    """

    uses_rope: bool
    sliding_window: int | None
    mixture: MixtureArch | None = None


@dataclass(frozen=True, slots=True)
class DecoderArch:
    """Everything that building and running a decoder needs to know of it.

    Attributes:
        model_type: the family, by its name in transformers.
        vocab_size: rows of the embedding and of the output head.
        hidden_size: width of the hidden states.
        intermediate_size: width inside the MLP.
        num_layers: number of layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: width of a head.
        attention_scale: factor on the scores, head_dim ** -0.5.
        rms_norm_eps: epsilon of all norms.
        activation: the function on the MLP's gate.
        attention_bias_qkv: whether the projections of queries, keys and values have biases.
        attention_bias_o: whether the projection after attention has one.
        mlp_bias: whether the projections of the MLP have biases.
        qk_norm: the RMS norm that queries and keys pass before they are rotated; None where they pass none.
        tie_word_embeddings: whether the output head is the embedding.
        rope: how positions become rotations.
        layers: the layers, first to last.
        context_length: the longest sequence that the checkpoint is made for, by the rule of `models.rope.context_length`.
        dtype: dtype of the weights in the files, by torch's name, or None where the configuration does not say.
        state_dtype: None; no layer recurs.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    rms_norm_eps: float
    activation: Literal["silu"]
    attention_bias_qkv: bool
    attention_bias_o: bool
    mlp_bias: bool
    qk_norm: QKNorm | None
    tie_word_embeddings: bool
    rope: RopeConfig
    layers: tuple[LayerArch, ...]
    context_length: int
    dtype: str | None
    state_dtype: str | None = None

    @property
    def layout(self) -> CacheLayout:
        """Every layer attends, and none recurs."""
        return CacheLayout((True,) * self.num_layers, self.num_kv_heads, self.head_dim, (False,) * self.num_layers)


DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS: Mapping[str, Literal["silu"]] = MappingProxyType({"silu": "silu", "swish": "silu"})


def read_arch(config: Mapping[str, Any]) -> DecoderArch:
    """Normalise the configuration of a Llama-like decoder.

    Args:
        config: the content of a checkpoint's `config.json`, with either spelling of the rotation: `rope_theta` and
            `rope_scaling`, or transformers 5's `rope_parameters`.

    Raises:
        CheckpointError: a key that is missing, of a wrong type, or that asks for something that is not supported; `what` is the
            key.
    """
    reader = ConfigReader(config)
    model_type = reader.choice("model_type", DECODER_FAMILIES)
    family = DECODER_FAMILIES[model_type]
    refuse_unsupported(reader, reads=family.reads)

    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer_or_none("num_key_value_heads", family.num_key_value_heads) or num_heads
    if num_heads % num_kv_heads:
        reader.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}", got=str(num_kv_heads))
    head_dim = reader.integer_or_none("head_dim", family.head_dim)
    if head_dim is None:
        if hidden_size % num_heads:
            reader.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or a head_dim")
        head_dim = hidden_size // num_heads
    qkv_bias = reader.flag("qkv_bias", family.qkv_bias) if "qkv_bias" in family.reads else family.qkv_bias
    has_bias = "attention_bias" in family.reads and reader.flag("attention_bias", False)
    max_positions = reader.integer("max_position_embeddings", family.max_position_embeddings)
    rope = read_rope(reader, head_dim=head_dim, max_positions=max_positions, default_theta=family.rope_theta)
    num_layers = reader.integer("num_hidden_layers")
    return DecoderArch(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        rms_norm_eps=reader.number("rms_norm_eps", family.rms_norm_eps),
        activation=ACTIVATIONS[reader.choice("hidden_act", ACTIVATIONS, "silu")],
        attention_bias_qkv=has_bias or qkv_bias,
        attention_bias_o=has_bias,
        mlp_bias="mlp_bias" in family.reads and reader.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.tie_word_embeddings),
        rope=rope,
        layers=_read_layers(reader, family, num_layers),
        context_length=context_length(rope, max_positions),
        dtype=read_dtype(reader),
    )


def _read_layers(reader: ConfigReader, family: DecoderFamily, num_layers: int) -> tuple[LayerArch, ...]:
    uses_rope = _rotated_layers(reader, num_layers) if "no_rope_layers" in family.reads else [True] * num_layers
    window = None
    if family.slides == "all" or ("use_sliding_window" in family.reads and reader.flag("use_sliding_window", False)):
        window = reader.integer_or_none("sliding_window", family.sliding_window)
    match family.slides:
        case "late":
            first = reader.integer("max_window_layers", 28, minimum=0)
            may_slide = [index >= first for index in range(num_layers)]
        case "unrotated":
            may_slide = [not rotated for rotated in uses_rope]
        case "all" | "none":
            may_slide = [True] * num_layers
    slides = [window is not None and item for item in may_slide]

    given = reader.items("layer_types")
    if given is not None:
        kinds = ("full_attention", "sliding_attention")
        if len(given) != num_layers or any(kind not in kinds for kind in given):
            reader.refuse("layer_types", f"{num_layers} of: {', '.join(kinds)}", got=f"{len(given)}: {given}")
        stated = [kind == "sliding_attention" for kind in given]
        if stated != slides and (window is None or family.slides == "all"):
            reader.refuse("layer_types", f"only {kinds[window is not None]}, by the other keys and this model type")
        slides = stated
    mixtures = _read_mixtures(reader, family.mixture, num_layers)
    return tuple(
        LayerArch(rotated, window if slide else None, mixture)
        for rotated, slide, mixture in zip(uses_rope, slides, mixtures, strict=True)
    )


def _read_mixtures(reader: ConfigReader, family: MixtureFamily | None, num_layers: int) -> list[MixtureArch | None]:
    """The experts of each layer; None for a layer that has an MLP."""
    if family is None:
        return [None] * num_layers
    key = reader.spelling("num_experts", "num_local_experts")
    num_experts = reader.integer(key, family.num_experts)
    top_k = reader.integer("num_experts_per_tok", family.top_k)
    if top_k > num_experts:
        reader.refuse("num_experts_per_tok", f"at most {key}, {num_experts}")
    normalizes = reader.flag("norm_topk_prob", False) if family.normalizes is None else family.normalizes
    shared = None
    if family.shared_width is not None:
        shared = reader.integer("shared_expert_intermediate_size", family.shared_width)
    mixture = MixtureArch(
        Routing(num_experts, top_k, "softmax", normalizes), reader.integer(family.width_key, family.width), shared
    )
    if not family.may_have_dense_layers:
        return [mixture] * num_layers
    step, dense = reader.integer("decoder_sparse_step", 1), reader.items("mlp_only_layers") or []
    if any(not isinstance(index, int) or not 0 <= index < num_layers for index in dense):
        reader.refuse("mlp_only_layers", f"indices of layers, from 0 to {num_layers - 1}")
    return [None if index in dense or (index + 1) % step else mixture for index in range(num_layers)]


def _rotated_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers rotate: 1 in `no_rope_layers` says yes; without the list, every `no_rope_layer_interval`-th does not."""
    given = reader.items("no_rope_layers")
    if given is None:
        interval = reader.integer("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(given) < num_layers or any(item not in (0, 1) for item in given):
        reader.refuse("no_rope_layers", f"at least {num_layers} of 1 (rotates) and 0")
    return [bool(item) for item in given[:num_layers]]


def read_dtype(reader: ConfigReader) -> str | None:
    """The dtype of the weights in the files, under its new or its old key; None where neither says."""
    key = "dtype" if reader.values.get("dtype") is not None else "torch_dtype"
    return None if reader.values.get(key) is None else reader.choice(key, DTYPES)


def refuse_unsupported(reader: ConfigReader, *, reads: frozenset[str]) -> None:
    """Refuse keys that would change the numbers in a way that no model here computes, but for those that this one reads.

    Raises:
        CheckpointError: the key.
    """
    config = reader.values
    architectures = reader.items("architectures") or []
    if architectures and not any(str(item).endswith("ForCausalLM") for item in architectures):
        reader.refuse("architectures", "a model that generates text, whose name ends in ForCausalLM")
    for key, neutral in CHANGES_RESULTS.items():
        if key not in reads and config.get(key) not in neutral:
            values = " or ".join(repr(value) for value in neutral[1:]) or "null"
            model_type = config.get("model_type")
            reader.refuse(key, f"no such key, or {values}", remedy=f"Models of type {model_type} do not compute it here.")
