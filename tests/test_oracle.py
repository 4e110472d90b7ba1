"""The oracle accepts right results and refuses planted faults, under every tolerance that kernels use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eightfold.quant.mxfp8 import MXTensor, dequantize, quantize
from tests.oracle import matches, product
from tests.tolerances import KERNEL_TOLERANCES

M, N, K = 33, 64, 576


def operands() -> tuple[Tensor, MXTensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(M, K, generator=generator), quantize(torch.randn(N, K, generator=generator))


def doubled_block(weight: MXTensor) -> Tensor:
    scale = weight.scale.clone()
    scale[:, 3] += 1
    return dequantize(MXTensor(weight.data, scale))


def doubled_block_of_one_row(weight: MXTensor) -> Tensor:
    scale = weight.scale.clone()
    scale[5, 3] += 1
    return dequantize(MXTensor(weight.data, scale))


def zero_row(result: Tensor) -> Tensor:
    result = result.clone()
    result[7] = 0
    return result


def swapped_columns(result: Tensor) -> Tensor:
    result = result.clone()
    result[:, [3, 4]] = result[:, [4, 3]]
    return result


def with_nan(result: Tensor) -> Tensor:
    result = result.clone()
    result[1, 1] = torch.nan
    return result


RESULT_FAULTS: list[Callable[[Tensor], Tensor]] = [
    lambda result: result * 2,
    lambda result: result * 1.02,
    zero_row,
    swapped_columns,
    with_nan,
    lambda result: result.roll(N // 2, dims=1),  # gate and up swapped
    lambda result: result.roll(16, dims=1),  # an expert off by one
    lambda result: result[:, :-1],
]
WEIGHT_FAULTS: list[Callable[[MXTensor], Tensor]] = [
    doubled_block,
    doubled_block_of_one_row,
    lambda weight: torch.cat((dequantize(weight)[:, :-32], torch.zeros(N, 32)), dim=1),  # the last 32 of K dropped
]


@pytest.mark.parametrize("dtype", KERNEL_TOLERANCES)
def test_a_right_result_is_accepted(dtype: torch.dtype) -> None:
    x, weight = operands()
    expected, magnitude = product(x, dequantize(weight))
    result = (x @ dequantize(weight).T).to(dtype)
    assert matches(result, expected, magnitude)


@pytest.mark.parametrize("fault", RESULT_FAULTS)
@pytest.mark.parametrize("dtype", KERNEL_TOLERANCES)
def test_a_fault_in_the_result_is_refused(dtype: torch.dtype, fault: Callable[[Tensor], Tensor]) -> None:
    x, weight = operands()
    expected, magnitude = product(x, dequantize(weight))
    assert not matches(fault(x @ dequantize(weight).T).to(dtype), expected, magnitude)


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
@pytest.mark.parametrize("dtype", KERNEL_TOLERANCES)
def test_a_fault_in_the_weight_is_refused(dtype: torch.dtype, fault: Callable[[MXTensor], Tensor]) -> None:
    x, weight = operands()
    expected, magnitude = product(x, dequantize(weight))
    assert not matches((x @ fault(weight).T).to(dtype), expected, magnitude)


def test_every_tolerance_has_a_reason_and_is_smaller_than_the_output() -> None:
    for tolerance in KERNEL_TOLERANCES.values():
        assert tolerance.why
        assert tolerance.accumulation + tolerance.rounding < 0.01
