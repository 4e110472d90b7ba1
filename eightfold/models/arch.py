"""The architecture of a Llama-like decoder, normalised from a Hugging Face `config.json`.

Families are data: a row of `DECODER_FAMILIES` for each model type says what differs, with the defaults that transformers' own
configuration class has for the keys that a `config.json` leaves out. Whatever would change the numbers and is not computed here
is refused by the name of its key. Keys that cannot change them (token ids, dropout, initialisation, training) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from eightfold.layers.rotary import RopeConfig
from eightfold.models.hf_config import ConfigReader
from eightfold.models.rope import context_length, read_rope


@dataclass(frozen=True, slots=True)
class LayerArch:
    """What may differ from layer to layer.

    Attributes:
        uses_rope: whether queries and keys are rotated by position.
        sliding_window: a query at position p sees keys p - window + 1 .. p; None sees all keys up to p.
    """

    uses_rope: bool
    sliding_window: int | None


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
        qk_norm: whether each head of queries and keys passes an RMS norm before it is rotated.
        tie_word_embeddings: whether the output head is the embedding.
        rope: how positions become rotations.
        layers: the layers, first to last.
        context_length: the longest sequence that the checkpoint is made for, by the rule of `models.rope.context_length`.
        dtype: dtype of the weights in the files, by torch's name, or None where the configuration does not say.
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
    qk_norm: bool
    tie_word_embeddings: bool
    rope: RopeConfig
    layers: tuple[LayerArch, ...]
    context_length: int
    dtype: str | None


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
        qk_norm: whether heads of queries and keys are normed.
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
    qk_norm: bool = False


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
            qk_norm=True,
        ),
        "smollm3": DecoderFamily(
            32768,
            num_key_value_heads=4,
            rope_theta=2_000_000.0,
            tie_word_embeddings=True,
            slides="unrotated",
            reads=frozenset({"attention_bias", "mlp_bias", "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"}),
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
    _refuse_unsupported(reader, model_type, family)

    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer_or_none("num_key_value_heads", family.num_key_value_heads) or num_heads
    if num_heads % num_kv_heads:
        reader.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}", got=str(num_kv_heads))
    head_dim = reader.integer_or_none("head_dim", family.head_dim)
    if head_dim is None:
        if hidden_size % num_heads:
            reader.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}, or a head_dim")
        head_dim = hidden_size // num_heads
    has_bias = "attention_bias" in family.reads and reader.flag("attention_bias", False)
    max_positions = reader.integer("max_position_embeddings", family.max_position_embeddings)
    rope = read_rope(reader, head_dim=head_dim, max_positions=max_positions, default_theta=family.rope_theta)
    num_layers = reader.integer("num_hidden_layers")
    dtype_key = "dtype" if config.get("dtype") is not None else "torch_dtype"
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
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[reader.choice("hidden_act", ACTIVATIONS, "silu")],
        attention_bias_qkv=has_bias or family.qkv_bias,
        attention_bias_o=has_bias,
        mlp_bias="mlp_bias" in family.reads and reader.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=reader.flag("tie_word_embeddings", family.tie_word_embeddings),
        rope=rope,
        layers=_read_layers(reader, family, num_layers),
        context_length=context_length(rope, max_positions),
        dtype=None if config.get(dtype_key) is None else reader.choice(dtype_key, DTYPES),
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
    return tuple(LayerArch(rotated, window if slide else None) for rotated, slide in zip(uses_rope, slides, strict=True))


def _rotated_layers(reader: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers rotate: 1 in `no_rope_layers` says yes; without the list, every `no_rope_layer_interval`-th does not."""
    given = reader.items("no_rope_layers")
    if given is None:
        interval = reader.integer("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(given) < num_layers or any(item not in (0, 1) for item in given):
        reader.refuse("no_rope_layers", f"at least {num_layers} of 1 (rotates) and 0")
    return [bool(item) for item in given[:num_layers]]


def _refuse_unsupported(reader: ConfigReader, model_type: str, family: DecoderFamily) -> None:
    """Refuse keys that would change the numbers in a way that these models do not compute."""
    config = reader.values
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, Mapping) else method
        reader.refuse(
            "quantization_config",
            "a checkpoint in bf16, fp16 or fp32; serialized quantized ones are not supported yet",
            got=f"quant_method {method}",
            remedy="Serve the checkpoint that this one was made from: Eightfold quantizes as it loads.",
        )
    architectures = reader.items("architectures") or []
    if architectures and not any(str(item).endswith("ForCausalLM") for item in architectures):
        reader.refuse("architectures", "a model that generates text, whose name ends in ForCausalLM")
    for key, neutral in CHANGES_RESULTS.items():
        if key not in family.reads and config.get(key) not in neutral:
            values = " or ".join(repr(value) for value in neutral[1:]) or "null"
            reader.refuse(key, f"no such key, or {values}", remedy=f"Models of type {model_type} do not compute it here.")
