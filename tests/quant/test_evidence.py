"""What the bits of a tensor say of the rule that made them."""

from __future__ import annotations

import pytest
import torch

from eightfold.quant import evidence
from eightfold.quant.evidence import Evidence, evidence_of
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, quantize


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e20])
def test_the_rule_is_found(rule: ScaleRule, scale: float) -> None:
    found = evidence_of(quantize(torch.randn(40, 100) * scale, rule))
    assert found.rule == rule.value
    assert found.by_ceil + found.by_either == sum(found.exponents.values()) == 160
    assert found.by_neither == 0


def test_the_share_under_ceil_is_that_of_even_mantissas() -> None:
    values = torch.exp2(torch.rand(20000) * 20).unsqueeze(1)
    found = evidence_of(quantize(values))
    assert abs(found.by_ceil / 20000 - 0.1468) < 0.01


@pytest.mark.parametrize(("amax", "by_ceil"), [(1.75, 0), (1.7501, 1), (1.99, 0), (1.92, 1), (1.0, 0)])
def test_where_the_rules_part(amax: float, by_ceil: int) -> None:
    """448 = 1.75 * 256: above that ceil takes the next scale, and 1.99 * 128 is rounded up to 256."""
    assert evidence_of(quantize(torch.tensor([[amax]]))).by_ceil == by_ceil


def test_another_rule_shows() -> None:
    mx = quantize(torch.randn(10, 64))
    doubled = MXTensor((mx.data.float() / 2).to(torch.float8_e4m3fn), mx.scale + 1)
    assert evidence_of(doubled).rule == "another"


def test_few_blocks_and_none_say_nothing() -> None:
    assert evidence_of(quantize(torch.ones(3, 32))).rule == "unknown"
    assert evidence_of(quantize(torch.zeros(500, 32))) == Evidence()
    assert evidence_of(quantize(torch.empty(0, 32))) == Evidence()


def test_exponents_are_counted_and_added(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.tensor([[448.0], [449.0], [0.0], [448.0 * 8]])
    found = evidence_of(quantize(rows))
    assert found.exponents == {0: 1, 1: 1, 3: 1}
    assert (found + found).exponents == {0: 2, 1: 2, 3: 2}
    assert (found + found).by_either == 2 * found.by_either
    w = torch.randn(50, 70)
    whole = evidence_of(quantize(w))
    monkeypatch.setattr(evidence, "_CHUNK_ELEMENTS", 300)
    assert evidence_of(quantize(w)) == whole


def test_the_smallest_scale_says_nothing() -> None:
    assert evidence_of(quantize(torch.full((200, 1), 1e-42))).by_neither == 0
