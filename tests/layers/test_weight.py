"""Weights made of parts: storage, quantization on arrival, completeness."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels.storage import Arena
from eightfold.layers.weight import ExpertWeight, Weight
from eightfold.quant.fp8 import WeightTensor
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
        weight.load(part, whole[part.place], decision=decision, rule=ScaleRule.CEIL, dtype=dtype, arena=Arena(CPU))
    return whole


def test_shape_parts_and_layer_names() -> None:
    weight = fused()
    assert weight.shape == (8, 40)
    assert [(part.name, *part.place) for part in weight.parts] == [
        ("a.q.weight", slice(0, 4)),
        ("a.k.weight", slice(4, 6)),
        ("a.v.weight", slice(6, 8)),
    ]
    assert weight.parts[1].shape == (2, 40)
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


def experts(*, gated: bool = True, rows: int = 3, padded: bool = True) -> ExpertWeight:
    return ExpertWeight("m.experts", ("gate_proj", "up_proj") if gated else ("up_proj",), 4, rows, 40, may_be_padded=padded)


def load_experts(weight: ExpertWeight, stored: dict[str, torch.Tensor], decision: Decision) -> WeightTensor:
    weight.choose_spelling(stored.__contains__)
    for part in weight.parts:
        weight.load(part, stored[part.name], decision=decision, rule=ScaleRule.CEIL, dtype=torch.float32, arena=Arena(CPU))
    return weight.take()


def stored_experts(gated: bool, rows: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same random experts one by one, and as one tensor."""
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    each = {f"m.experts.{expert}.{name}.weight": torch.randn(rows, 40) for expert in range(4) for name in names}
    whole = torch.stack([torch.cat([each[f"m.experts.{expert}.{name}.weight"] for name in names]) for expert in range(4)])
    return each, {"m.experts.gate_up_proj" if gated else "m.experts.up_proj": whole}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("decision", [QUANTIZED, KEPT])
def test_fault_2_experts_without_a_gate_have_the_rows_of_one_projection(gated: bool, decision: Decision) -> None:
    """Both spellings give the same experts, every row of which is written: fresh memory holds NaN."""
    weight = experts(gated=gated)
    assert weight.shape == (4, 6 if gated else 3, 40)
    each, fused = stored_experts(gated, rows=3)
    (expected,) = fused.values()
    for stored in (each, fused):
        found = load_experts(experts(gated=gated), stored, decision)
        if isinstance(found, MXTensor):
            assert torch.equal(found.data.view(torch.uint8), quantize(expected).data.view(torch.uint8))
            assert torch.equal(found.scale, quantize(expected).scale)
        else:
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, expected)


def test_fault_3_gates_come_before_ups_only_where_there_are_gates() -> None:
    """Row r of the gate of expert e is row r of W13[e], and of the up projection row I + r; without a gate row r is up's."""
    for gated in (False, True):
        each, _ = stored_experts(gated, rows=3)
        found = load_experts(experts(gated=gated), each, KEPT)
        assert isinstance(found, torch.Tensor)
        for expert in range(4):
            for row in range(3):
                up = each[f"m.experts.{expert}.up_proj.weight"][row]
                assert torch.equal(found[expert, row + (3 if gated else 0)], up)
                if gated:
                    assert torch.equal(found[expert, row], each[f"m.experts.{expert}.gate_proj.weight"][row])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("decision", [QUANTIZED, KEPT])
def test_experts_that_are_padded_are_cut_with_their_scales(gated: bool, decision: Decision) -> None:
    each, fused = stored_experts(gated, rows=5)
    plain = {name: tensor[:3] for name, tensor in each.items()}
    expected = load_experts(experts(gated=gated), plain, decision)
    for stored in (each, fused):
        weight = experts(gated=gated)
        weight.choose_spelling(stored.__contains__)
        for part in weight.parts:
            assert (
                weight.cut(part, stored[part.name].shape) == "5 rows are cut to the 3 that the down projection has columns for"
            )
        found = load_experts(weight, stored, decision)
        for ours, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert torch.equal(ours, theirs)


def tensors_of(value: WeightTensor) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [value.data.view(torch.uint8), value.scale]


@pytest.mark.parametrize("shape", [(2, 40), (5, 41), (5, 40, 1), (40,)])
def test_experts_that_are_narrower_or_otherwise_shaped_are_not_cut(shape: tuple[int, ...]) -> None:
    weight = experts()
    assert weight.cut(weight.parts[0], shape) is None


def test_a_down_projection_is_never_cut() -> None:
    weight = experts(gated=False, padded=False)
    assert weight.cut(weight.parts[0], (5, 40)) is None
    assert fused().cut(fused().parts[0], (5, 40)) is None


@pytest.mark.parametrize("decision", [QUANTIZED, KEPT])
def test_loading_again_writes_into_the_memory_that_is_in_use(decision: Decision) -> None:
    weight = fused()
    fill(weight, decision)
    first = weight.take()
    assert weight.in_use
    where = [tensor.data_ptr() for tensor in tensors_of(first)]
    weight.begin()
    fill(weight, decision, order=(2, 1, 0))
    assert [tensor.data_ptr() for tensor in tensors_of(weight.take())] == where


def test_loading_again_makes_new_memory_where_none_is_in_use_or_the_format_changed() -> None:
    weight = fused()
    fill(weight, QUANTIZED)
    weight.take()
    assert not weight.in_use
    fill(weight, KEPT)
    kept = weight.take_dense()
    fill(weight, KEPT, torch.bfloat16)
    assert weight.take_dense().dtype == torch.bfloat16
    assert kept.dtype == torch.float32
