"""The oracle accepts right results and refuses planted faults, under every tolerance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eightfold.quant.mxfp8 import MXTensor, dequantize, quantize
from tests.oracle import assert_matches, product
from tests.tolerances import BF16, FP32, LOGITS, OF_DTYPE, TOLERANCES, Tolerance

M, N, K, NUM_EXPERTS = 33, 64, 576, 4
every_tolerance = pytest.mark.parametrize("tolerance", TOLERANCES, ids=lambda tolerance: tolerance.name)


def operands() -> tuple[Tensor, MXTensor]:
    """Activations `[M, K]` and a weight `[N, K]`, as a kernel gets them."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(M, K, generator=generator), quantize(torch.randn(N, K, generator=generator))


def as_written(result: Tensor, tolerance: Tolerance) -> Tensor:
    """An fp64 result as a kernel of this tolerance writes it."""
    return result.to(tolerance.dtypes[0]) if tolerance.dtypes else result


def changed(result: Tensor, index: int | tuple[int, int], value: float) -> Tensor:
    result = result.clone()
    result[index] = value
    return result


def with_scale_doubled(weight: MXTensor, rows: slice) -> Tensor:
    scale = weight.scale.clone()
    scale[rows, 3] += 1
    return dequantize(MXTensor(weight.data, scale))


RESULT_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all doubled": lambda result: result * 2,
    "all times 1.02": lambda result: result * 1.02,
    "a zero row": lambda result: changed(result, 7, 0.0),
    "two columns swapped": lambda result: result[:, [0, 1, 2, 4, 3, *range(5, N)]],
    "a NaN": lambda result: changed(result, (1, 1), torch.nan),
    "an infinity": lambda result: changed(result, (1, 1), torch.inf),
    "a column missing": lambda result: result[:, :-1],
    "a row alone, which would broadcast": lambda result: result[:1],
}
WEIGHT_FAULTS: dict[str, Callable[[MXTensor], Tensor]] = {
    "a K block's scale doubled": lambda weight: with_scale_doubled(weight, slice(None)),
    "one block's scale doubled": lambda weight: with_scale_doubled(weight, slice(5, 6)),
    "the last 32 of K dropped": lambda weight: torch.cat((dequantize(weight)[:, :-32], torch.zeros(N, 32)), dim=1),
}


@every_tolerance
def test_a_right_result_is_accepted(tolerance: Tolerance) -> None:
    x, weight = operands()
    expected, magnitude = product(x, dequantize(weight))
    assert_matches(as_written(expected, tolerance), expected, tolerance, magnitude)
    assert_matches(as_written(expected, tolerance), expected, tolerance)


def test_an_fp32_product_in_another_order_is_accepted() -> None:
    x, weight = operands()
    expected, magnitude = product(x, dequantize(weight))
    assert_matches(x @ dequantize(weight).T, expected, FP32, magnitude)


@every_tolerance
@pytest.mark.parametrize("fault", RESULT_FAULTS)
def test_a_fault_in_the_result_is_refused(fault: str, tolerance: Tolerance) -> None:
    expected, magnitude = product(operands()[0], dequantize(operands()[1]))
    for terms in (None, magnitude):
        with pytest.raises(AssertionError):
            assert_matches(as_written(RESULT_FAULTS[fault](expected), tolerance), expected, tolerance, terms)


@every_tolerance
@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_in_the_weight_is_refused(fault: str, tolerance: Tolerance) -> None:
    x, weight = operands()
    expected, magnitude = product(x, dequantize(weight))
    for terms in (None, magnitude):
        with pytest.raises(AssertionError):
            assert_matches(as_written(product(x, WEIGHT_FAULTS[fault](weight))[0], tolerance), expected, tolerance, terms)


def gated(*, swapped: bool = False, shift: int = 0) -> Tensor:
    """silu(gate) * up of each token's expert `[M, N]`: right, or with gate and up swapped, or with the experts shifted."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(M, K, generator=generator)
    stored = torch.stack([dequantize(quantize(torch.randn(2 * N, K, generator=generator))) for _ in range(NUM_EXPERTS)])
    expert = torch.randint(NUM_EXPERTS, (M,), generator=generator)
    both = torch.einsum("mk,mnk->mn", x.double(), stored.double()[(expert + shift) % NUM_EXPERTS])  # [M, 2 * N]
    gate, up = both.roll(N, dims=1).chunk(2, dim=1) if swapped else both.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


@every_tolerance
def test_gate_and_up_swapped_or_an_expert_off_by_one_is_refused(tolerance: Tolerance) -> None:
    assert_matches(as_written(gated(), tolerance), gated(), tolerance)
    for wrong in (gated(swapped=True), gated(shift=1)):
        with pytest.raises(AssertionError):
            assert_matches(as_written(wrong, tolerance), gated(), tolerance)


def test_a_result_in_another_dtype_is_refused() -> None:
    expected = torch.ones(20, 20)
    for dtype, tolerance in OF_DTYPE.items():
        assert_matches(expected.to(dtype), expected, tolerance)
    with pytest.raises(AssertionError, match=r"bf16 result: dtype torch.float32, expected one of \(torch.bfloat16,\)"):
        assert_matches(expected, expected, BF16)


def test_the_message_says_where_and_how_much() -> None:
    expected = torch.ones(20, 20)
    with pytest.raises(AssertionError, match=r"fp32 result: got 1.5 at \(2, 3\), expected 1"):
        assert_matches(changed(expected, (2, 3), 1.5), expected, FP32)
    with pytest.raises(AssertionError, match="the oracle is not finite"):
        assert_matches(expected, expected * torch.nan, FP32)


def test_small_faults_everywhere_are_found_by_the_norm() -> None:
    expected = changed(torch.full((20, 20), 1e-3), (0, 0), 1.0)
    with pytest.raises(AssertionError, match="norm"):
        assert_matches(expected + 5e-7, expected, FP32)


def test_every_tolerance_has_a_reason_and_is_below_the_smallest_planted_factor() -> None:
    assert len({tolerance.name for tolerance in TOLERANCES}) == len(TOLERANCES)
    for tolerance in TOLERANCES:
        assert len(tolerance.why) > 20
        assert max(tolerance.relative_norm, tolerance.accumulation + tolerance.rounding) < 0.02 / 4
    assert LOGITS < 1e-3
