"""Configurations to architectures: equal to what transformers makes of the same file, and refusals by key."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from eightfold.errors import CheckpointError
from eightfold.kernels.operations import Routing
from eightfold.models.arch import DecoderArch, LayerArch, MixtureArch, read_arch
from eightfold.models.families import CHANGES_RESULTS, DECODER_FAMILIES
from eightfold.models.rope import ROPE_KEYS
from tests.models.checkpoints import DECODER_CASES, Case

NEEDED = {
    "vocab_size": 130_000,  # above every default of a token id
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
}
each_family = pytest.mark.parametrize("model_type", DECODER_FAMILIES)


def expected_arch(config: PreTrainedConfig) -> dict[str, Any]:
    """What transformers makes of a configuration, read off its attributes and off a model without storage."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    first = model.model.layers[0]
    return {
        "vocab_size": model.lm_head.out_features,
        "hidden_size": model.lm_head.in_features,
        "intermediate_size": config.intermediate_size,
        "num_layers": len(model.model.layers),
        "num_heads": first.self_attn.q_proj.out_features // first.self_attn.head_dim,
        "num_kv_heads": first.self_attn.k_proj.out_features // first.self_attn.head_dim,
        "head_dim": first.self_attn.head_dim,
        "attention_scale": first.self_attn.scaling,
        "rms_norm_eps": first.input_layernorm.variance_epsilon,
        "attention_bias_qkv": first.self_attn.q_proj.bias is not None,
        "attention_bias_o": first.self_attn.o_proj.bias is not None,
        "mlp_bias": getattr(getattr(first.mlp, "down_proj", None), "bias", None) is not None,
        "qk_norm": norm_of(first.self_attn),
        "state_dtype": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "layers": tuple(
            LayerArch(
                bool(getattr(layer.self_attn, "use_rope", True)), window_of(config, layer.self_attn), mixture_of(layer.mlp)
            )
            for layer in model.model.layers
        ),
        "rope": (config.rope_parameters["rope_type"], config.rope_parameters["rope_theta"]),
        "dtype": None if config.dtype is None else str(config.dtype).removeprefix("torch."),
    }


def norm_of(attention: Any) -> str | None:
    if not hasattr(attention, "q_norm"):
        return None
    return "head" if attention.q_norm.weight.numel() == attention.head_dim else "whole"


def mixture_of(mlp: Any) -> MixtureArch | None:
    """Mixtral's router has no attribute that says whether it normalizes, since it always does."""
    if not hasattr(mlp, "gate"):
        return None
    routing = Routing(mlp.gate.num_experts, mlp.gate.top_k, "softmax", getattr(mlp.gate, "norm_topk_prob", True))
    shared = mlp.shared_expert.down_proj.in_features if hasattr(mlp, "shared_expert") else None
    return MixtureArch(routing, mlp.experts.down_proj.shape[-1], shared)


def window_of(config: PreTrainedConfig, attention: Any) -> int | None:
    window = getattr(
        attention, "sliding_window", config.sliding_window if config.model_type in ("mistral", "mixtral") else None
    )
    assert window is None or isinstance(window, int)
    return window


def facts(arch: DecoderArch) -> dict[str, Any]:
    found = {name: getattr(arch, name) for name in DecoderArch.__dataclass_fields__}
    for name in ("model_type", "activation", "context_length"):
        del found[name]
    return found | {"rope": (arch.rope.type, arch.rope.theta)}


def arch_of(**changes: Any) -> DecoderArch:
    return read_arch({"model_type": "llama"} | NEEDED | changes)


@each_family
def test_missing_keys_have_the_defaults_of_transformers(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **NEEDED)
    arch = read_arch({"model_type": model_type} | NEEDED)
    assert facts(arch) == expected_arch(config)
    assert arch.model_type == model_type
    assert arch.activation == config.hidden_act
    assert arch.context_length == config.max_position_embeddings


@each_family
def test_null_stands_for_as_many_kv_heads_as_query_heads(model_type: str) -> None:
    """Whatever the default of the missing key."""
    assert read_arch({"model_type": model_type, "num_key_value_heads": None} | NEEDED).num_kv_heads == 32


@pytest.mark.parametrize("item", DECODER_CASES, ids=lambda item: item.name)
def test_saved_configurations_equal_transformers(item: Case, tmp_path: Path) -> None:
    config = item.make_config()
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    arch = read_arch(saved)
    assert facts(arch) == expected_arch(config)
    assert read_arch(old_spelling(saved)) == arch
    factor = arch.rope.factor if arch.rope.type == "linear" else 1
    assert arch.context_length == config.max_position_embeddings * factor


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as transformers 4 wrote it."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    scaling = dict(config["rope_parameters"])
    old |= {"rope_theta": scaling.pop("rope_theta"), "torch_dtype": config["dtype"]}
    return old | {"rope_scaling": None if scaling["rope_type"] == "default" else scaling}


def test_activation_by_its_other_name() -> None:
    assert arch_of(hidden_act="swish").activation == "silu"


def test_dtype_by_either_key() -> None:
    assert arch_of(torch_dtype="float16").dtype == "float16"
    assert arch_of(dtype="bfloat16", torch_dtype="float16").dtype == "bfloat16"


def test_keys_that_do_not_change_results_are_not_read() -> None:
    extra = {
        "architectures": ["LlamaForCausalLM"],
        "attention_dropout": 0.1,
        "auto_map": {},
        "bos_token_id": [1],
        "eos_token_id": None,
        "initializer_range": 9,
        "pretraining_tp": 1,
        "sliding_window": 4096,  # llama reads neither this nor its companions
        "transformers_version": "4.1",
        "unsloth_version": "2024",
        "use_cache": False,
    }
    assert arch_of(**extra) == arch_of()


def test_keys_that_could_change_results_are_accepted_where_they_do_not() -> None:
    for key, neutral in CHANGES_RESULTS.items():
        for value in neutral:
            if not (key in DECODER_FAMILIES["llama"].reads and value is None):
                assert arch_of(**{key: value}) == arch_of()


def test_layer_types_may_repeat_what_other_keys_say() -> None:
    full, sliding = ["full_attention"] * 6, ["sliding_attention"] * 6
    assert arch_of(layer_types=full) == arch_of()
    mistral = arch_of(model_type="mistral", sliding_window=16)
    assert arch_of(model_type="mistral", sliding_window=16, layer_types=sliding) == mistral
    qwen = arch_of(model_type="qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    assert [layer.sliding_window for layer in qwen.layers] == [None, None, 16, 16, 16, 16]
    kinds = [*full[:5], sliding[0]]
    by_type = arch_of(model_type="qwen2", use_sliding_window=True, sliding_window=16, layer_types=kinds)
    assert by_type == replace(qwen, layers=(*[LayerArch(True, None)] * 5, LayerArch(True, 16)))


QWEN_WINDOW = {"model_type": "qwen3", "use_sliding_window": True}
SMOL = {"model_type": "smollm3"}

REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "lama"},
        f"model_type: got 'lama'; expected one of: {', '.join(DECODER_FAMILIES)}. Did you mean llama?",
    ),
    ({"model_type": "gpt2"}, "model_type: got 'gpt2'; expected one of: llama, mistral, qwen2, qwen3, smollm3"),
    ({"model_type": None}, "model_type: got None; expected one of: llama"),
    ({"hidden_size": None}, "hidden_size: got None; expected a whole number, at least 1"),
    ({"hidden_size": "64"}, "hidden_size: got '64'; expected a whole number, at least 1"),
    ({"vocab_size": 0}, "vocab_size: got 0; expected a whole number, at least 1"),
    ({"num_hidden_layers": True}, "num_hidden_layers: got True; expected a whole number, at least 1"),
    ({"intermediate_size": 96.5}, "intermediate_size: got 96.5; expected a whole number, at least 1"),
    ({"max_position_embeddings": "long"}, "max_position_embeddings: got 'long'; expected a whole number"),
    ({"num_attention_heads": 7}, "num_attention_heads: got 7; expected a divisor of hidden_size, 64, or a head_dim"),
    ({"num_key_value_heads": 5}, "num_key_value_heads: got 5; expected a divisor of num_attention_heads, 32"),
    (
        {"model_type": "mistral", "num_attention_heads": 4},
        "num_key_value_heads: got 8; expected a divisor of num_attention_heads, 4",
    ),
    ({"head_dim": 0}, "head_dim: got 0; expected a whole number, at least 1"),
    ({"head_dim": 9}, "head_dim: got 9; expected an even number"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: got '1e-6'; expected a positive number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps: got 0; expected a positive number"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'; expected one of: silu, swish"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings: got 'no'; expected true or false"),
    ({"attention_bias": 1}, "attention_bias: got 1; expected true or false"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype: got 'float8_e4m3fn'; expected one of: bfloat16, float16, float32"),
    ({"dtype": "int8"}, "dtype: got 'int8'; expected one of: bfloat16, float16, float32"),
    ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type: got 'longrope'; expected one of: default, linear"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures: got ['LlamaForSequenceClassification']; expected a model that generates text",
    ),
    ({"architectures": "LlamaForCausalLM"}, "architectures: got 'LlamaForCausalLM'; expected a list"),
    (
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping: got 50.0; expected no such key, or null. Models of type llama do not compute it here.",
    ),
    ({"residual_multiplier": 0.22}, "residual_multiplier: got 0.22; expected no such key, or 1."),
    ({"pretraining_tp": 2}, "pretraining_tp: got 2; expected no such key, or 1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5; expected 1"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers: got [1, 0]; expected no such key, or null"),
    ({"use_sliding_window": True}, "use_sliding_window: got True; expected no such key, or False"),
    ({"model_type": "mistral", "attention_bias": True}, "attention_bias: got True; expected no such key, or False"),
    ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias: got True; expected no such key, or False"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: got 0; expected a whole number, at least 1"),
    ({**QWEN_WINDOW, "sliding_window": 1.5}, "sliding_window: got 1.5; expected a whole number, at least 1"),
    ({**QWEN_WINDOW, "max_window_layers": -1}, "max_window_layers: got -1; expected a whole number, at least 0"),
    (
        {**QWEN_WINDOW, "layer_types": ["full_attention"]},
        "layer_types: got 1: ['full_attention']; expected 6 of: full_attention",
    ),
    ({**QWEN_WINDOW, "layer_types": ["chunked_attention"] * 6}, "expected 6 of: full_attention, sliding_attention"),
    (
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 6},
        "expected only full_attention, by the other keys and this model type",
    ),
    ({"layer_types": ["sliding_attention"] * 6, "sliding_window": 8}, "expected only full_attention, by the other keys"),
    (
        {"model_type": "mistral", "layer_types": ["full_attention"] * 6},
        "expected only sliding_attention, by the other keys and this model type",
    ),
    ({**SMOL, "no_rope_layers": [1, 0, 1]}, "no_rope_layers: got [1, 0, 1]; expected at least 6 of 1 (rotates) and 0"),
    ({**SMOL, "no_rope_layers": [1, 0, 1, 2, 1, 1]}, "no_rope_layers: got [1, 0, 1, 2, 1, 1]; expected at least 6 of 1"),
    ({**SMOL, "no_rope_layers": 4}, "no_rope_layers: got 4; expected a list"),
    ({**SMOL, "no_rope_layer_interval": 0}, "no_rope_layer_interval: got 0; expected a whole number, at least 1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message.partition(";")[0] for _, message in REFUSALS])
def test_refusals_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        arch_of(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["model_type", *NEEDED])
def test_needed_keys(key: str) -> None:
    config = {"model_type": "llama"} | NEEDED
    del config[key]
    with pytest.raises(CheckpointError, match=f"^{key}: got nothing; expected"):
        read_arch(config)


@pytest.mark.parametrize("key", CHANGES_RESULTS)
def test_every_key_that_changes_results_is_refused_or_read(key: str) -> None:
    for model_type, family in DECODER_FAMILIES.items():
        if key not in family.reads:
            with pytest.raises(CheckpointError, match=f"^{key}: got 'odd'; expected no such key, or .*{model_type}"):
                arch_of(model_type=model_type, **{key: "odd"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.floats(-1e6, 1e6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROPE_TYPES = st.sampled_from(list(ROPE_KEYS)) | JSON
ROPE_VALUES = st.sampled_from(sorted({key for keys in ROPE_KEYS.values() for key in keys}))
KEYS = [*NEEDED, *CHANGES_RESULTS, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act"]
KEYS += ["tie_word_embeddings", "sliding_window", "max_window_layers", "layer_types", "rope_theta", "rope_scaling", "dtype"]
KEYS += ["torch_dtype", "architectures", "quantization_config", "partial_rotary_factor", "original_max_position_embeddings"]


@given(
    model_type=st.sampled_from(list(DECODER_FAMILIES)),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    rope_type=ROPE_TYPES,
    rope=st.dictionaries(ROPE_VALUES, JSON, max_size=4),
)
def test_any_json_is_read_or_refused(model_type: str, changes: dict[str, Any], rope_type: object, rope: dict[str, Any]) -> None:
    """No configuration raises anything but a refusal."""
    config = {"rope_parameters": {"rope_type": rope_type, **rope}} | changes
    with suppress(CheckpointError):
        arch = arch_of(model_type=model_type, **config)
        assert len(arch.layers) == arch.num_layers
        assert arch.context_length >= 1
