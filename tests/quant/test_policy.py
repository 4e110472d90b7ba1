"""Which tensors are quantized, and the reasons of the others."""

from __future__ import annotations

import pytest

from eightfold.errors import InputError
from eightfold.quant.policy import Policy, Role, matches

MXFP8 = Policy("mxfp8")
QKV = tuple(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")


@pytest.mark.parametrize("role", Role)
def test_only_projections_are_quantized_and_each_other_role_has_a_reason(role: Role) -> None:
    decision = MXFP8.decide(role, ["model.layers.0.x"])
    assert decision.quantized == (role in (Role.LINEAR, Role.EXPERTS))
    assert decision.quantized != bool(decision.reason)


@pytest.mark.parametrize("role", Role)
def test_nothing_is_quantized_without_quantization(role: Role) -> None:
    decision = Policy(None).decide(role, ["model.layers.0.x"])
    assert (decision.quantized, decision.reason) == (False, "quantization is off")


def test_the_head_is_quantized_when_asked_for() -> None:
    assert not MXFP8.decide(Role.HEAD, ["lm_head"]).quantized
    assert Policy("mxfp8", quantize_lm_head=True).decide(Role.HEAD, ["lm_head"]).quantized


@pytest.mark.parametrize(
    ("pattern", "layer", "expected"),
    [
        ("fc1", "model.layers.0.fc1", True),
        ("fc1", "model.layers.0.fc10", False),
        ("fc1", "model.layers.0.my_fc1", False),
        ("layers.1", "model.layers.1.mlp.down_proj", True),
        ("layers.1", "model.layers.11.mlp.down_proj", False),
        ("model.layers.0.mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("mlp.down_proj", "model.layers.0.mlp.down_proj", True),
        ("mlp.down", "model.layers.0.mlp.down_proj", False),
        ("down_proj.", "model.layers.0.mlp.down_proj", True),
    ],
)
def test_patterns_match_at_dots(pattern: str, layer: str, expected: bool) -> None:
    assert matches(pattern, layer) is expected


def test_an_ignored_layer_names_the_pattern() -> None:
    decision = Policy("mxfp8", ("layers.1",)).decide(Role.LINEAR, QKV)
    assert (decision.quantized, decision.reason) == (False, "ignored by layers.1")


def test_parts_of_a_fused_tensor_must_agree() -> None:
    with pytest.raises(InputError, match=r"q_proj without .*k_proj.*v_proj; expected all parts or none"):
        Policy("mxfp8", ("q_proj",)).decide(Role.LINEAR, QKV)
    assert not Policy("mxfp8", ("q_proj", "k_proj", "v_proj")).decide(Role.LINEAR, QKV).quantized


def test_a_pattern_that_matches_nothing_is_refused_with_an_example() -> None:
    with pytest.raises(InputError, match=r"layers\.9, which matches no layer; expected names such as model\.layers\.1"):
        Policy("mxfp8", ("layers.9",)).check_ignored(QKV)
    Policy("mxfp8", ("layers.1",)).check_ignored(QKV)
