"""The architecture of a Nemotron-H, normalised from a Hugging Face `config.json` in any of its spellings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eightfold.kernels.operations import Routing
from eightfold.models.arch import read_dtype, refuse_unsupported
from eightfold.models.hf_config import ConfigReader
from eightfold.models.mamba_arch import MambaArch, read_dt_limits
from eightfold.models.nemotron_h import LatentMixtureArch, NemotronHArch

# The pattern comes as a string of these letters, or as a list of any of the words.
LAYER_WORDS: Mapping[str, str] = MappingProxyType(
    {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
)
_PATTERN = f"a text of {' '.join(sorted(set(LAYER_WORDS.values())))}, or a list of these or of: {', '.join(LAYER_WORDS)}"
PATTERN_KEYS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
READS = frozenset({"attention_bias", "mlp_bias", "n_routed_experts", "num_local_experts"})
STATE_DTYPES = ("float32", "bfloat16")


def read_arch(config: Mapping[str, Any]) -> NemotronHArch:
    """Normalise the configuration of a Nemotron-H, with transformers' defaults for keys that are left out.

    Raises:
        CheckpointError: a key that is missing, of a wrong type, or that asks for something that is not supported; `what` is the
            key.
    """
    reader = ConfigReader(config)
    model_type = reader.choice("model_type", ("nemotron_h",))
    refuse_unsupported(reader, reads=READS)
    if config.get("sliding_window") is not None:
        reader.refuse("sliding_window", "null: attention sees the whole text here")
    pattern = _read_pattern(reader)
    num_heads = reader.integer("num_attention_heads", 32)
    num_kv_heads = reader.integer_or_none("num_key_value_heads", 8) or num_heads
    if num_heads % num_kv_heads:
        reader.refuse("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}", got=str(num_kv_heads))
    reader.choice("mlp_hidden_act", ("relu2",), "relu2")
    state_dtype = config.get("mamba_ssm_cache_dtype")
    return NemotronHArch(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size", 131072),
        hidden_size=reader.integer("hidden_size", 4096),
        intermediate_size=reader.integer("intermediate_size", 21504),
        pattern=pattern,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=reader.integer("head_dim", 128),
        mamba=_read_mamba(reader) if "M" in pattern else None,
        mixture=_read_mixture(reader) if "E" in pattern else None,
        norm_eps=reader.number("layer_norm_epsilon", 1e-5),
        mlp_bias=reader.flag("mlp_bias", False),
        attention_bias=reader.flag("attention_bias", False),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        context_length=reader.integer("max_position_embeddings", 4096),
        dtype=read_dtype(reader),
        state_dtype=None if state_dtype is None else reader.choice("mamba_ssm_cache_dtype", STATE_DTYPES),
    )


def _read_pattern(reader: ConfigReader) -> str:
    """One letter a layer, from whichever key has it."""
    found = {key: _letters(reader, key) for key in PATTERN_KEYS if reader.values.get(key) is not None}
    if not found:
        reader.refuse(PATTERN_KEYS[0], _PATTERN)
    key, pattern = next(iter(found.items()))
    other = next((name for name, letters in found.items() if letters != pattern), None)
    if other is not None:
        reader.refuse(other, f"the same layers as in {key}, or one of the two keys alone")
    num_layers = reader.values.get("num_hidden_layers")
    if num_layers is not None and num_layers != len(pattern):
        reader.refuse("num_hidden_layers", f"{len(pattern)}, the layers in {key}, or no such key")
    return pattern


def _letters(reader: ConfigReader, key: str) -> str:
    """The layers under one key: a text of letters, or a list of letters or words."""
    given = reader.values[key]
    letters = {letter: letter for letter in LAYER_WORDS.values()}
    spelled = letters if isinstance(given, str) else letters | dict(LAYER_WORDS)
    if not isinstance(given, str | list) or not given or not all(isinstance(item, str) and item in spelled for item in given):
        reader.refuse(key, _PATTERN)
    return "".join(spelled[item] for item in given)


def _read_mamba(reader: ConfigReader) -> MambaArch:
    reader.choice("mamba_hidden_act", ("silu",), "silu")
    num_heads, num_groups = (
        reader.integer("mamba_num_heads", 128),
        reader.integer(reader.spelling("n_groups", "mamba_n_groups"), 8),
    )
    if num_heads % num_groups:
        reader.refuse("n_groups", f"a divisor of mamba_num_heads, {num_heads}", got=str(num_groups))
    return MambaArch(
        num_heads=num_heads,
        head_dim=reader.integer("mamba_head_dim", 64),
        state_size=reader.integer("ssm_state_size", 128),
        num_groups=num_groups,
        conv_kernel=reader.integer(reader.spelling("conv_kernel", "mamba_d_conv"), 4, minimum=2),
        dt_limits=read_dt_limits(reader, reader.spelling("time_step_limit", "mamba_dt_limit")),
        proj_bias=reader.flag("use_bias", False),
        conv_bias=reader.flag(reader.spelling("use_conv_bias", "mamba_conv_bias"), True),
    )


def _read_mixture(reader: ConfigReader) -> LatentMixtureArch:
    num_experts = reader.integer(reader.spelling("n_routed_experts", "num_local_experts"), 8)
    top_k, num_groups = reader.integer("num_experts_per_tok", 2), reader.integer("n_group", 1)
    topk_groups = reader.integer("topk_group", 1)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        reader.refuse("n_group", f"a divisor of the {num_experts} experts, with two or more of them in a group")
    if topk_groups > num_groups:
        reader.refuse("topk_group", f"at most n_group, {num_groups}")
    if top_k > topk_groups * (num_experts // num_groups):
        reader.refuse("num_experts_per_tok", f"at most {topk_groups * (num_experts // num_groups)}, the experts to choose from")
    if reader.integer("n_shared_experts", 1, minimum=0) != 1:
        reader.refuse("n_shared_experts", "1, of the width that moe_shared_expert_intermediate_size gives")
    routing = Routing(
        num_experts,
        top_k,
        "sigmoid",
        normalize=reader.flag("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        topk_groups=topk_groups,
    )
    return LatentMixtureArch(
        routing,
        reader.integer("moe_intermediate_size", 7688),
        reader.integer("moe_shared_expert_intermediate_size", 7688),
        reader.integer_or_none("moe_latent_size", None),
    )
