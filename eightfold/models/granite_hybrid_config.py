"""The architecture of a Granite 4 hybrid, normalised from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eightfold.kernels.operations import Routing
from eightfold.layers.rotary import RopeConfig
from eightfold.models.arch import MixtureArch, read_dtype, refuse_unsupported
from eightfold.models.granite_hybrid import GraniteHybridArch
from eightfold.models.hf_config import ConfigReader
from eightfold.models.mamba_arch import MambaArch, read_dt_limits
from eightfold.models.rope import context_length, read_rope

READS = frozenset(
    {
        "attention_bias",
        "attention_multiplier",
        "embedding_multiplier",
        "logits_scaling",
        "num_experts",
        "num_local_experts",
        "residual_multiplier",
    }
)
ATTENTION_WORDS, MAMBA_WORDS = ("attention", "full_attention"), ("mamba", "linear_attention")


def read_arch(config: Mapping[str, Any]) -> GraniteHybridArch:
    """Normalise the configuration of a Granite hybrid, with transformers' defaults for keys that are left out.

    Raises:
        CheckpointError: a key that is missing, of a wrong type, or that asks for something that is not supported; `what` is the
            key.
    """
    reader = ConfigReader(config)
    model_type = reader.choice("model_type", ("granitemoehybrid",))
    refuse_unsupported(reader, reads=READS)
    reader.choice("hidden_act", ("silu", "swish"), "silu")
    hidden_size, num_heads = reader.integer("hidden_size", 4096), reader.integer("num_attention_heads", 32)
    num_kv_heads = reader.integer_or_none("num_key_value_heads", None) or num_heads
    if num_heads % num_kv_heads:
        reader.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}", got=str(num_kv_heads))
    if hidden_size % num_heads:
        reader.refuse("num_attention_heads", f"a divisor of hidden_size, {hidden_size}")
    head_dim, max_positions = hidden_size // num_heads, reader.integer("max_position_embeddings", 2048)
    rope = _read_rope(reader, head_dim, max_positions)
    return GraniteHybridArch(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size", 32000),
        hidden_size=hidden_size,
        attends=_read_layers(reader),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention_scale=reader.number("attention_multiplier", 1.0),
        attention_bias=reader.flag("attention_bias", False),
        rope=rope,
        mamba=_read_mamba(reader, hidden_size),
        mixture=_read_mixture(reader),
        shared_intermediate_size=reader.integer("shared_intermediate_size", 1024),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        embedding_multiplier=reader.number("embedding_multiplier", 1.0),
        residual_multiplier=reader.number("residual_multiplier", 1.0),
        logits_scaling=reader.number("logits_scaling", 1.0),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        context_length=max_positions if rope is None else context_length(rope, max_positions),
        dtype=read_dtype(reader),
    )


def _read_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """For each layer, whether it attends. Without a list, none does."""
    num_layers = reader.integer("num_hidden_layers", 32)
    found: dict[str, tuple[bool, ...]] = {}
    for key in ("layer_types", "layers_block_type"):
        words = reader.items(key)
        if words is None:
            continue
        if len(words) != num_layers or any(word not in ATTENTION_WORDS + MAMBA_WORDS for word in words):
            reader.refuse(key, f"{num_layers} of: {', '.join(ATTENTION_WORDS + MAMBA_WORDS)}", got=f"{len(words)}: {words}")
        found[key] = tuple(word in ATTENTION_WORDS for word in words)
    if len(set(found.values())) > 1:
        reader.refuse("layers_block_type", "the same layers as in layer_types, or one of the two keys alone")
    return next(iter(found.values()), (False,) * num_layers)


def _read_rope(reader: ConfigReader, head_dim: int, max_positions: int) -> RopeConfig | None:
    kind = reader.values.get("position_embedding_type")
    if kind in (None, "nope"):
        return None
    reader.choice("position_embedding_type", ("rope", "nope"))
    return read_rope(reader, head_dim=head_dim, max_positions=max_positions, default_theta=10_000.0)


def _read_mamba(reader: ConfigReader, hidden_size: int) -> MambaArch:
    num_heads, num_groups = reader.integer("mamba_n_heads", 128), reader.integer("mamba_n_groups", 1)
    inner_size = reader.integer("mamba_expand", 2) * hidden_size
    stated = reader.values.get("mamba_d_head", "auto")
    head_dim = inner_size // num_heads if stated == "auto" else reader.integer("mamba_d_head")
    if head_dim * num_heads != inner_size:
        reader.refuse(
            "mamba_n_heads", f"heads that make up mamba_expand * hidden_size, {inner_size}", got=f"{num_heads} of {head_dim}"
        )
    if num_heads % num_groups:
        reader.refuse("mamba_n_groups", f"a divisor of mamba_n_heads, {num_heads}", got=str(num_groups))
    return MambaArch(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=reader.integer("mamba_d_state", 256),
        num_groups=num_groups,
        conv_kernel=reader.integer("mamba_d_conv", 4, minimum=2),
        dt_limits=read_dt_limits(reader, "time_step_limit"),
        proj_bias=reader.flag("mamba_proj_bias", False),
        conv_bias=reader.flag("mamba_conv_bias", True),
    )


def _read_mixture(reader: ConfigReader) -> MixtureArch | None:
    """Experts; None where their number is 0. A softmax over the chosen is one over all that is made to sum to one."""
    num_experts = reader.integer("num_local_experts", 8, minimum=0)
    if num_experts == 0:
        return None
    top_k = reader.integer("num_experts_per_tok", 2)
    if top_k > num_experts:
        reader.refuse("num_experts_per_tok", f"at most num_local_experts, {num_experts}")
    routing = Routing(num_experts, top_k, "softmax", normalize=True)
    return MixtureArch(routing, reader.integer("intermediate_size", 11008), shared_intermediate_size=None)
