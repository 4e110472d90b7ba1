"""Weights made of parts: storage, quantization on arrival, completeness."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels.storage import Arena
from eightfold.layers.weight import Weight
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, quantize
from eightfold.quant.policy import Decision, Role

QUANTIZED, KEPT = Decision(True, ""), Decision(False, "norm")
CPU = torch.device("cpu")


def fused() -> Weight:
    return Weight("qkv.weight", Role.LINEAR, {"a.q.weight": 4, "a.k.weight": 2, "a.v.weight": 2}, 40)


def fill(
    weight: Weight, decision: Decision, dtype: torch.dtype = torch.float32, order: tuple[int, ...] = (0, 1, 2)
) -> torch.Tensor:
    whole = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    for index in order:
        part = weight.parts[index]
        weight.load(part, whole[part.rows], decision=decision, rule=ScaleRule.CEIL, dtype=dtype, arena=Arena(CPU))
    return whole


def test_shape_parts_and_layer_names() -> None:
    weight = fused()
    assert weight.shape == (8, 40)
    assert [(part.name, part.rows.start, part.rows.stop) for part in weight.parts] == [
        ("a.q.weight", 0, 4),
        ("a.k.weight", 4, 6),
        ("a.v.weight", 6, 8),
    ]
    assert weight.part_shape(weight.parts[1]) == (2, 40)
    assert weight.layers == ("a.q", "a.k", "a.v")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_quantized_in_any_order_equal_the_whole_quantized(order: tuple[int, ...]) -> None:
    weight = fused()
    whole = fill(weight, QUANTIZED, order=order)
    found, expected = weight.take(), quantize(whole)
    assert isinstance(found, MXTensor)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(found.scale, expected.scale)


def test_a_kept_weight_is_a_copy_in_the_asked_dtype() -> None:
    weight = fused()
    whole = fill(weight, KEPT, torch.bfloat16)
    found = weight.take_dense()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, whole.bfloat16())


def test_an_incomplete_weight_names_what_is_missing_and_a_whole_one_is_taken_once() -> None:
    weight = fused()
    fill(weight, QUANTIZED, order=(0, 2))
    assert weight.missing == ("a.k.weight",)
    with pytest.raises(RuntimeError, match=r"qkv\.weight is not whole: a\.k\.weight"):
        weight.take()
    fill(weight, QUANTIZED, order=(1,))
    weight.take()
    with pytest.raises(RuntimeError, match="taken before"):
        weight.take()


@pytest.mark.parametrize("decision", [QUANTIZED, KEPT])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(decision: Decision, bad: float) -> None:
    weight = Weight("w", Role.LINEAR, {"w": 2}, 32)
    tensor = torch.zeros(2, 32)
    tensor[1, 5] = bad
    with pytest.raises(ValueError, match=r"nan|inf|NaN"):
        weight.load(weight.parts[0], tensor, decision=decision, rule=ScaleRule.CEIL, dtype=torch.float32, arena=Arena(CPU))


def test_a_quantized_weight_is_not_taken_for_a_dense_one() -> None:
    weight = fused()
    fill(weight, QUANTIZED)
    with pytest.raises(RuntimeError, match="needs it dense"):
        weight.take_dense()
