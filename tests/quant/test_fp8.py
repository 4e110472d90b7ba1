"""FP8 under fp32 scales: the three shapes of scales, views, and copies that refuse NaN."""

from __future__ import annotations

import pytest
import torch

from eightfold.quant.fp8 import FP8Tensor, copy, dequantize, empty_like, from_blocks, widen
from eightfold.quant.mxfp8 import quantize

DATA = torch.arange(-15, 15).view(5, 6).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (5,), (5, 1)])
def test_one_scale_a_tensor_or_a_row(shape: tuple[int, ...]) -> None:
    scale = torch.rand(shape) + 0.5
    found = from_blocks(DATA, scale, None)
    expected = DATA.float() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(()))
    assert torch.equal(dequantize(found), expected)
    assert torch.equal(widen(found[1:3]), expected[1:3])


@pytest.mark.parametrize("block", [(2, 4), (5, 6), (1, 2), (128, 128)])
def test_blocks_that_do_not_divide_the_shape(block: tuple[int, int]) -> None:
    grid = (-(-5 // block[0]), -(-6 // block[1]))
    scale = torch.rand(grid) + 0.5
    found = dequantize(from_blocks(DATA, scale, block))
    for row in range(5):
        for column in range(6):
            assert found[row, column] == DATA[row, column].float() * scale[row // block[0], column // block[1]]


def test_one_scale_for_each_expert() -> None:
    experts = torch.stack([DATA, DATA])
    found = dequantize(from_blocks(experts, torch.tensor([2.0, 3.0]), None))
    assert torch.equal(found, torch.stack([DATA.float() * 2, DATA.float() * 3]))


def test_scales_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"a scale of shape \[4\] where the tensor needs one number, or one for each of 5"):
        from_blocks(DATA, torch.ones(4), None)
    with pytest.raises(ValueError, match=r"blocks of 2 x 2 need \[3, 3\]"):
        from_blocks(DATA, torch.ones(2, 2), (2, 2))
    with pytest.raises(ValueError, match="needs scales"):
        FP8Tensor(DATA, torch.ones(5, 2), 6)
    with pytest.raises(ValueError, match="float32 scales"):
        FP8Tensor(DATA, torch.ones(5, 1, dtype=torch.bfloat16), 6)


def test_copies() -> None:
    for source in (from_blocks(DATA, torch.rand(5), None), quantize(torch.randn(5, 40))):
        target = empty_like(source, tuple(source.shape), lambda shape, dtype: torch.empty(shape, dtype=dtype))
        copy(source, target)
        assert torch.equal(widen(target), widen(source))
    broken = from_blocks(DATA, torch.tensor([1.0, 1.0, float("inf"), 1.0, 1.0]), None)
    target = empty_like(broken, (5, 6), lambda shape, dtype: torch.empty(shape, dtype=dtype))
    with pytest.raises(ValueError, match=r"NaN in a scale at index \[2, 0\]"):
        copy(broken, target)
    with pytest.raises(ValueError, match="does not go into"):
        copy(broken, quantize(torch.randn(5, 6)))


def test_columns_are_cut_between_blocks_alone() -> None:
    mx = quantize(torch.randn(3, 80))
    assert torch.equal(widen(mx.columns(32, 80)), widen(mx)[:, 32:])
    with pytest.raises(ValueError, match="columns 0 to 40 of 80 cut a block of 32 at 40"):
        mx.columns(0, 40)
