"""Reading the rotation from both spellings, and every refusal by key."""

from __future__ import annotations

from typing import Any

import pytest

from eightfold.errors import CheckpointError
from eightfold.layers.rotary import RopeConfig
from eightfold.models.hf_config import ConfigReader
from eightfold.models.rope import context_length, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


def read(config: dict[str, Any], *, head_dim: int = 64, max_positions: int = 4096) -> RopeConfig:
    return read_rope(ConfigReader(config), head_dim=head_dim, max_positions=max_positions, default_theta=10_000.0)


SPELLINGS: list[tuple[str, dict[str, Any], RopeConfig]] = [
    ("nothing", {}, RopeConfig("default", 1e4, 64)),
    ("old, null", {"rope_theta": 5e5, "rope_scaling": None}, RopeConfig("default", 5e5, 64)),
    ("old, empty", {"rope_theta": 500_000, "rope_scaling": {}}, RopeConfig("default", 5e5, 64)),
    ("old, type", {"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig("linear", 1e4, 64, factor=2.0)),
    ("old, rope_type", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, RopeConfig("linear", 1e4, 64, factor=2.0)),
    (
        "old, both words",
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        RopeConfig("llama3", 5e5, 64, 8.0, 8192, 1.0, 4.0),
    ),
    ("new", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig("default", 1e6, 64)),
    ("new, theta alone", {"rope_parameters": {"rope_theta": 1e6}}, RopeConfig("default", 1e6, 64)),
    (
        "new, yarn",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "truncate": False, "attention_factor": 0.8, **YARN}},
        RopeConfig("yarn", 1e6, 64, 4.0, 32768, attention_factor=0.8, truncate=False),
    ),
    (
        "yarn with a remark",
        {"rope_scaling": {"type": "yarn", "finetuned": True, **YARN}},
        RopeConfig("yarn", 1e4, 64, 4.0, 32768),
    ),
    ("yarn, nulls", {"rope_scaling": {"type": "yarn", "mscale": None, **YARN}}, RopeConfig("yarn", 1e4, 64, 4.0, 32768)),
    ("yarn, no original", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, RopeConfig("yarn", 1e4, 64, 4.0, 4096)),
    (
        "yarn, original outside",
        {"original_max_position_embeddings": 1024, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        RopeConfig("yarn", 1e4, 64, 4.0, 1024),
    ),
    ("dynamic", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig("dynamic", 1e4, 64, 2.0, 4096)),
    (
        "both spellings",
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 5e5, "factor": 2.0},
        },
        RopeConfig("linear", 5e5, 64, 2.0),
    ),
    (
        "whole heads, said twice",
        {"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 1}},
        RopeConfig("default", 1e4, 64),
    ),
]


@pytest.mark.parametrize(("config", "expected"), [item[1:] for item in SPELLINGS], ids=[item[0] for item in SPELLINGS])
def test_spellings(config: dict[str, Any], expected: RopeConfig) -> None:
    assert read(config) == expected


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": "linear"}, "rope_scaling: got 'linear'; expected a JSON object"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "rope_scaling.type: got 'longrope'; expected one of: default, linear, llama3, yarn, dynamic",
    ),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type: got 'proportional'; expected one of"),
    ({"rope_scaling": {"type": "linaer", "factor": 2.0}}, "Did you mean linear?"),
    ({"rope_scaling": {"rope_type": 3}}, "rope_scaling.rope_type: got 3; expected one of: default"),
    (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "rope_scaling.type: got 'linear'; expected the same as rope_type, 'yarn'",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [16, 24, 24]}},
        "rope_scaling.mrope_section: got [16, 24, 24]; expected only keys of rope type linear: rope_type, type, rope_theta,",
    ),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor: got 2.0; expected only keys of rope type default"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}},
        "rope_scaling.original_max_position_embeddings: got 512; expected only keys of rope type dynamic",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention: got {'rope_type': 'default'}; expected only keys of rope type default",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: got nothing; expected a number, at least 1"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor: got '2'; expected a number, at least 1"),
    ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "rope_scaling.factor: got 0.5; expected a number, at least 1"),
    (
        {"rope_scaling": {"type": "llama3"} | {key: LLAMA3[key] for key in ("factor", "low_freq_factor")}},
        "rope_scaling.high_freq_factor: got nothing; expected a positive number",
    ),
    (
        {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor: got 1; expected more than low_freq_factor, 1",
    ),
    (
        {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}},
        "rope_scaling.original_max_position_embeddings: got 0; expected a whole number, at least 1",
    ),
    (
        {"rope_scaling": {"type": "yarn", **YARN, "beta_slow": 64}},
        "rope_scaling.beta_fast: got 32; expected more than beta_slow, 64",
    ),
    ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, "rope_scaling.truncate: got 1; expected true or false"),
    (
        {"rope_scaling": {"type": "yarn", **YARN, "attention_factor": -1.0}},
        "rope_scaling.attention_factor: got -1.0; expected a positive number",
    ),
    ({"rope_theta": "10000"}, "rope_theta: got '10000'; expected a number, at least 2"),
    ({"rope_theta": 1}, "rope_theta: got 1; expected a number, at least 2"),
    (
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
        "rope_theta: got 10000.0; expected the same as rope_parameters.rope_theta, 500000.0",
    ),
    (
        {"original_max_position_embeddings": 512, "rope_scaling": {"type": "yarn", **YARN}},
        "original_max_position_embeddings: got 512; expected the same as rope_scaling.original_max_position_embeddings, 32768",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
        "rope_scaling.factor: got 2.0; expected the same as rope_parameters.factor, 4.0",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5; expected 1, since these model types rotate"),
]


@pytest.mark.parametrize(("config", "message"), REFUSALS, ids=[message.partition(";")[0] for _, message in REFUSALS])
def test_refusals_by_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(("head_dim", "config"), [(5, {}), (2, {"rope_scaling": {"type": "dynamic", "factor": 2.0}})])
def test_a_head_that_cannot_be_rotated_is_refused(head_dim: int, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=rf"head_dim: got {head_dim}; expected an even number that rope type"):
        read(config, head_dim=head_dim)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeConfig("default", 1e4, 64), 40960),
        (RopeConfig("linear", 1e4, 64, 2.5), 102400),
        (RopeConfig("llama3", 5e5, 64, 8.0, 8192), 40960),
        (RopeConfig("yarn", 1e6, 64, 4.0, 32768), 131072),
        (RopeConfig("yarn", 1e6, 64, 1.0, 32768), 40960),
        (RopeConfig("dynamic", 1e4, 64, 4.0, 40960), 40960),
    ],
    ids=lambda value: value.type if isinstance(value, RopeConfig) else str(value),
)
def test_context_length(rope: RopeConfig, expected: int) -> None:
    assert context_length(rope, 40960) == expected
