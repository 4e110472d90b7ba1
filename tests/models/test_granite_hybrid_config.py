"""Configurations of Granite hybrids to architectures, and refusals by key."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from eightfold.errors import CheckpointError
from eightfold.models.granite_hybrid_config import read_arch


def arch_of(**changes: Any) -> Any:
    return read_arch({"model_type": "granitemoehybrid"} | changes)


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    config: Any = AutoConfig.for_model("granitemoehybrid")
    arch = arch_of()
    assert (arch.vocab_size, arch.hidden_size, len(arch.attends)) == (32000, config.hidden_size, config.num_hidden_layers)
    assert (arch.num_heads, arch.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert arch.attends == tuple(word == "full_attention" for word in config.layer_types)
    assert (arch.mamba.num_heads, arch.mamba.head_dim, arch.mamba.state_size, arch.mamba.num_groups) == (
        config.mamba_n_heads,
        config.mamba_d_head,
        config.mamba_d_state,
        config.mamba_n_groups,
    )
    assert (arch.attention_scale, arch.embedding_multiplier, arch.residual_multiplier, arch.logits_scaling) == (1, 1, 1, 1)
    assert arch.rope is None
    assert (arch.mixture.routing.num_experts, arch.mixture.routing.top_k) == (8, 2)
    assert (arch.mixture.intermediate_size, arch.shared_intermediate_size) == (11008, 1024)


@pytest.mark.parametrize("key", ["layer_types", "layers_block_type"])
def test_words_for_layers(key: str) -> None:
    words = ["mamba", "attention", "linear_attention", "full_attention"]
    assert arch_of(num_hidden_layers=4, **{key: words}).attends == (False, True, False, True)


def test_positions_are_rotated_only_where_it_says_so() -> None:
    assert arch_of(position_embedding_type="nope").rope is None
    assert arch_of(position_embedding_type="rope", rope_theta=5000.0).rope.theta == 5000.0


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2, "layer_types": ["mamba"]}, "layer_types: got 1: ['mamba']; expected 2 of"),
    (
        {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "layers_block_type": ["mamba", "mamba"]},
        "layers_block_type: got ['mamba', 'mamba']; expected the same layers as in layer_types",
    ),
    ({"position_embedding_type": "alibi"}, "position_embedding_type: got 'alibi'; expected one of: rope, nope"),
    ({"mamba_n_heads": 100}, "mamba_n_heads: got 100 of 81; expected heads that make up mamba_expand * hidden_size, 8192"),
    ({"mamba_n_groups": 3}, "mamba_n_groups: got 3; expected a divisor of mamba_n_heads, 128"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok: got 9; expected at most num_local_experts, 8"),
    ({"hidden_act": "gelu"}, "hidden_act: got 'gelu'; expected one of: silu, swish"),
    ({"num_attention_heads": 33}, "num_attention_heads: got 33; expected a divisor of hidden_size, 4096"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message.partition(";")[0] for _, message in REFUSALS])
def test_refusals_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        arch_of(**changes)
    assert message in str(caught.value)
