"""Rotary tables against transformers: the frequencies, and the tables that its own modules compute from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eightfold.layers.rotary import RopeConfig, RopeType, attention_factor, inverse_frequencies, rotary_table

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

# (id, type, max_position_embeddings, theta, parameters)
CASES: list[tuple[str, RopeType, int, float, dict[str, Any]]] = [
    ("default", "default", 8192, 10_000.0, {}),
    ("default, theta of Qwen", "default", 131072, 1e6, {}),
    ("linear", "linear", 4096, 10_000.0, {"factor": 4.0}),
    ("linear, fraction", "linear", 4096, 10_000.0, {"factor": 1.7}),
    ("llama 3.1", "llama3", 131072, 500_000.0, LLAMA3),
    ("llama 3.2", "llama3", 131072, 500_000.0, LLAMA3 | {"factor": 32.0}),
    ("yarn of Qwen", "yarn", 131072, 1e6, YARN),
    ("yarn, attention factor", "yarn", 131072, 1e6, YARN | {"attention_factor": 0.75}),
    ("yarn, mscale", "yarn", 131072, 10_000.0, YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.1}),
    ("yarn, one mscale alone", "yarn", 131072, 10_000.0, YARN | {"mscale": 0.707}),
    ("yarn, betas", "yarn", 131072, 10_000.0, YARN | {"beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn, not truncated", "yarn", 131072, 10_000.0, YARN | {"truncate": False}),
    ("yarn, ramp of no width", "yarn", 64, 10_000.0, {"factor": 2.0, "original_max_position_embeddings": 3}),
    ("yarn, no stretch", "yarn", 32768, 1e6, YARN | {"factor": 1.0}),
    ("dynamic", "dynamic", 4096, 10_000.0, {"factor": 4.0}),
    ("dynamic, fraction", "dynamic", 2048, 10_000.0, {"factor": 1.1}),
]


def over(cases: list[tuple[str, RopeType, int, float, dict[str, Any]]]) -> pytest.MarkDecorator:
    names = ("rope_type", "max_positions", "theta", "parameters")
    return pytest.mark.parametrize(names, [case[1:] for case in cases], ids=[case[0] for case in cases])


def pair(
    rope_type: RopeType,
    max_positions: int,
    theta: float,
    parameters: dict[str, Any],
    *,
    head_dim: int = 64,
    rotary_dim: int = 64,
) -> tuple[RopeConfig, LlamaConfig]:
    """The same rotation for Eightfold and for transformers."""
    rope = RopeConfig(type=rope_type, theta=theta, rotary_dim=rotary_dim, **parameters)
    if rope_type == "dynamic":
        rope = RopeConfig(rope_type, theta, rotary_dim, parameters["factor"], max_positions)
    stated = {"rope_type": rope_type, "rope_theta": theta, **parameters}
    if rotary_dim != head_dim:
        stated["partial_rotary_factor"] = rotary_dim / head_dim
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=stated,
    )
    return rope, config


def table_of_transformers(config: LlamaConfig, positions: Tensor) -> Tensor:
    """Cosines, then sines, of half the angles: transformers repeats them over both halves of the head."""
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    half = cos.shape[-1] // 2
    assert torch.equal(cos[0, :, :half], cos[0, :, half:])
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@over(CASES)
def test_every_type_equals_transformers(
    rope_type: RopeType, max_positions: int, theta: float, parameters: dict[str, Any]
) -> None:
    rope, config = pair(rope_type, max_positions, theta, parameters)
    table = rotary_table(rope, max_positions)
    assert table.dtype is torch.float32
    assert table.shape == (max_positions, 64)
    positions = torch.tensor([0, 1, 2, 31, max_positions // 2, max_positions - 1])
    assert torch.allclose(table[positions], table_of_transformers(config, positions), rtol=0, atol=1e-6)


# With dynamic scaling frequencies depend on the length; it has tests of its own.
@over([case for case in CASES if case[1] != "dynamic"])
def test_far_positions_equal_transformers(
    rope_type: RopeType, max_positions: int, theta: float, parameters: dict[str, Any]
) -> None:
    rope, config = pair(rope_type, max_positions, theta, parameters)
    positions = torch.tensor([8191, 100_003, 131071])
    assert torch.allclose(rotary_table(rope, 131072)[positions], table_of_transformers(config, positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rotary_dim", [4, 16, 32, 46])
@pytest.mark.parametrize("name", ["linear", "llama 3.1", "yarn of Qwen", "yarn, mscale", "dynamic"])
def test_frequencies_equal_transformers_bit_for_bit_where_part_of_a_head_rotates(name: str, rotary_dim: int) -> None:
    case = next(item for item in CASES if item[0] == name)
    rope, config = pair(*case[1:], head_dim=64, rotary_dim=rotary_dim)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[rope.type](config, torch.device("cpu"))
    assert torch.equal(inverse_frequencies(rope, case[2]), expected)
    assert attention_factor(rope) == expected_factor


def test_default_rotation_of_part_of_a_head_is_that_of_a_narrower_head() -> None:
    narrow, config = pair("default", 64, 1e4, {}, head_dim=16, rotary_dim=16)
    assert torch.equal(rotary_table(narrow, 64), table_of_transformers(config, torch.arange(64)))


@pytest.mark.parametrize("max_position", [1, 63, 64])
def test_dynamic_within_the_original_length_is_plain_rope(max_position: int) -> None:
    dynamic, config = pair("dynamic", 64, 1e4, {"factor": 4.0})
    table = rotary_table(dynamic, max_position)
    assert torch.equal(table, rotary_table(RopeConfig("default", 1e4, 64), max_position))
    assert torch.equal(table, table_of_transformers(config, torch.arange(max_position)))


@pytest.mark.parametrize("max_position", [65, 100, 256])
def test_dynamic_beyond_it_has_the_frequencies_of_a_prefill_of_the_full_length(max_position: int) -> None:
    dynamic, config = pair("dynamic", 64, 1e4, {"factor": 4.0})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=max_position)
    assert torch.equal(inverse_frequencies(dynamic, max_position), expected)
    # In its forward pass transformers has the length as a tensor, and so computes the new theta in fp32.
    prefill = table_of_transformers(config, torch.arange(max_position))
    assert torch.allclose(rotary_table(dynamic, max_position), prefill, rtol=0, atol=1e-4)
    assert not torch.allclose(prefill[:64], rotary_table(dynamic, 64), atol=1e-2)


@pytest.mark.parametrize("name", ["linear", "llama 3.1", "yarn of Qwen"])
def test_rows_do_not_depend_on_the_length_of_the_table(name: str) -> None:
    rope, _ = pair(*next(item for item in CASES if item[0] == name)[1:])
    assert torch.equal(rotary_table(rope, 300)[:77], rotary_table(rope, 77))


def test_angles_depend_on_distance_alone() -> None:
    """cos(p a) cos(q a) + sin(p a) sin(q a) = cos((p - q) a): what makes a cached key good for every later query."""
    rope, _ = pair("dynamic", 64, 1e4, {"factor": 4.0})
    table = rotary_table(rope, 200)
    cos, sin = table.chunk(2, dim=-1)
    for query, key in ((50, 10), (150, 110), (199, 159)):
        assert torch.allclose(cos[query] * cos[key] + sin[query] * sin[key], cos[40], atol=1e-5)
