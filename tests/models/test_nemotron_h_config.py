"""Configurations of Nemotron-H to architectures, and refusals by key."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from eightfold.errors import CheckpointError
from eightfold.models.nemotron_h_config import LAYER_WORDS, PATTERN_KEYS, read_arch
from tests.models.checkpoints import NEMOTRON_CASES, Case

PATTERN = {"hybrid_override_pattern": "ME*-"}


def arch_of(**changes: Any) -> Any:
    return read_arch({"model_type": "nemotron_h"} | PATTERN | changes)


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    config: Any = AutoConfig.for_model("nemotron_h", **PATTERN)
    arch = arch_of()
    assert (arch.vocab_size, arch.hidden_size, arch.intermediate_size) == (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
    )
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (32, config.num_key_value_heads, config.head_dim)
    assert (arch.norm_eps, arch.mlp_bias, arch.context_length) == (
        config.layer_norm_epsilon,
        config.mlp_bias,
        config.max_position_embeddings,
    )
    mamba, mixture = arch.mamba, arch.mixture
    assert (mamba.num_heads, mamba.head_dim, mamba.state_size, mamba.num_groups) == (
        config.mamba_num_heads,
        config.mamba_head_dim,
        config.ssm_state_size,
        config.n_groups,
    )
    assert (mamba.conv_kernel, mamba.conv_bias, mamba.proj_bias) == (config.conv_kernel, config.use_conv_bias, config.use_bias)
    assert mamba.dt_limits == tuple(config.time_step_limit)
    assert (mixture.routing.num_experts, mixture.routing.top_k, mixture.routing.scale) == (
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.routed_scaling_factor,
    )
    assert (mixture.intermediate_size, mixture.shared_intermediate_size, mixture.latent_size) == (
        config.moe_intermediate_size,
        config.moe_shared_expert_intermediate_size,
        None,
    )


@pytest.mark.parametrize("item", NEMOTRON_CASES, ids=lambda item: item.name)
def test_saved_configurations_are_read(item: Case, tmp_path: Path) -> None:
    config: Any = item.make_config()
    config.save_pretrained(tmp_path)
    arch = read_arch(json.loads((tmp_path / "config.json").read_text()) | {"time_step_limit": None})
    assert arch.pattern == config.hybrid_override_pattern
    assert arch.hidden_size == config.hidden_size
    assert (arch.mamba is not None, arch.mixture is not None) == ("M" in arch.pattern, "E" in arch.pattern)


@pytest.mark.parametrize("key", PATTERN_KEYS)
@pytest.mark.parametrize("words", [list(LAYER_WORDS), ["mamba", "moe", "attention", "mlp"]], ids=["all", "older"])
def test_every_word_for_a_layer_under_every_key(key: str, words: list[str]) -> None:
    expected = "".join(LAYER_WORDS[word] for word in words)
    assert read_arch({"model_type": "nemotron_h", key: words}).pattern == expected


def test_older_spellings() -> None:
    older = arch_of(mamba_n_groups=4, mamba_d_conv=3, mamba_dt_limit=[0.1, 0.5], mamba_conv_bias=False)
    newer = arch_of(n_groups=4, conv_kernel=3, time_step_limit=[0.1, 0.5], use_conv_bias=False)
    assert older == newer
    assert (older.mamba.num_groups, older.mamba.dt_limits) == (4, (0.1, 0.5))


def test_step_limits_may_be_open() -> None:
    assert arch_of(time_step_limit=[0.0, math.inf]).mamba.dt_limits == (0.0, math.inf)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: got 'MX'; expected a text of * - E M"),
    ({"hybrid_override_pattern": None}, "hybrid_override_pattern: got None; expected a text"),
    ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "wizard"]}, "layers_block_type: got"),
    (
        {"layers_block_type": ["mamba", "mlp"]},
        "layers_block_type: got ['mamba', 'mlp']; expected the same layers as in hybrid_",
    ),
    (
        {"hybrid_override_pattern": [["M"]]},
        "hybrid_override_pattern: got [['M']]; expected a text of * - E M, or a list of these",
    ),
    ({"n_routed_experts": 8, "num_local_experts": 3}, "num_local_experts: got 3; expected 8, as n_routed_experts says"),
    ({"num_hidden_layers": 5}, "num_hidden_layers: got 5; expected 4, the layers in hybrid_override_pattern"),
    ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: got 'silu'; expected one of: relu2"),
    ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act: got 'gelu'; expected one of: silu"),
    ({"sliding_window": 128}, "sliding_window: got 128; expected null"),
    ({"n_shared_experts": 2}, "n_shared_experts: got 2; expected 1"),
    ({"n_groups": 3}, "n_groups: got 3; expected a divisor of mamba_num_heads, 128"),
    ({"n_group": 3}, "n_group: got 3; expected a divisor of the 8 experts"),
    ({"n_group": 8, "topk_group": 8}, "n_group: got 8; expected a divisor of the 8 experts, with two or more"),
    ({"n_group": 2, "topk_group": 3}, "topk_group: got 3; expected at most n_group, 2"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok: got 9; expected at most 8"),
    ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok: got 3; expected at most 2"),
    ({"time_step_limit": [0.5, 0.1]}, "time_step_limit: got [0.5, 0.1]; expected a smallest and a largest step"),
    ({"time_step_limit": 3}, "time_step_limit: got 3; expected a list"),
    ({"mamba_ssm_cache_dtype": "float8"}, "mamba_ssm_cache_dtype: got 'float8'; expected one of: float32, bfloat16"),
    ({"num_key_value_heads": 5}, "num_key_value_heads: got 5; expected a divisor of num_attention_heads, 32"),
    (
        {"logit_scale": 2.0},
        "logit_scale: got 2.0; expected no such key, or 1. Models of type nemotron_h do not compute it here.",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message.partition(";")[0] for _, message in REFUSALS])
def test_refusals_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        arch_of(**changes)
    assert message in str(caught.value)


JSON = (
    st.none() | st.booleans() | st.integers(-2, 200) | st.floats(-1e6, 1e6) | st.text(max_size=5) | st.lists(st.integers(-1, 3))
)
KEYS = ["hybrid_override_pattern", "layers_block_type", "n_groups", "n_group", "topk_group", "num_experts_per_tok", "head_dim"]
KEYS += [
    "n_routed_experts",
    "moe_latent_size",
    "time_step_limit",
    "conv_kernel",
    "use_bias",
    "mlp_bias",
    "mamba_ssm_cache_dtype",
]


@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_any_json_is_read_or_refused(changes: dict[str, Any]) -> None:
    with suppress(CheckpointError):
        assert arch_of(**changes).pattern
