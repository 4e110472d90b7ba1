"""Layouts of scales by the formulas that the vendors give, place by place."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels.scale_layouts import LaidOutScales, ScaleLayout, arrange

SIZES = [(1, 1), (7, 18), (8, 4), (33, 5), (127, 58), (128, 4), (129, 84), (300, 3)]


def place(layout: ScaleLayout, r: int, c: int, blocks: int) -> int:
    """The index of row r and block c of a matrix with `blocks` blocks a row."""
    padded = (blocks + 3) // 4 * 4
    if layout is ScaleLayout.LINEAR:
        return r * blocks + c
    if layout is ScaleLayout.TILES_128X4:
        return c % 4 + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + (r // 128) * 128 * padded
    return (r // 8) * (padded // 4 * 32) + (c // 4) * 32 + (r % 8) * 4 + c % 4


@pytest.mark.parametrize("layout", ScaleLayout)
@pytest.mark.parametrize(("rows", "blocks"), SIZES)
def test_every_scale_lies_where_the_formula_says_and_the_rest_is_one(layout: ScaleLayout, rows: int, blocks: int) -> None:
    scale = torch.randint(0, 120, (rows, blocks), dtype=torch.uint8)
    found = arrange(scale, layout)
    expected = torch.full_like(found.data, 127)
    for r in range(rows):
        for c in range(blocks):
            expected[place(layout, r, c, blocks)] = scale[r, c]
    assert torch.equal(found.data, expected)


def test_scales_in_another_order_are_refused() -> None:
    scales = arrange(torch.zeros(3, 2, dtype=torch.uint8), ScaleLayout.LINEAR)
    assert scales.need(ScaleLayout.LINEAR) is scales.data
    with pytest.raises(ValueError, match="lie in the layout linear, and 128x4 is read"):
        scales.need(ScaleLayout.TILES_128X4)


def test_a_tensor_of_the_wrong_size_is_no_layout() -> None:
    with pytest.raises(ValueError, match=r"128x4 scales of 3 x 2 blocks need uint8 \[512\], got torch.uint8 \[6\]"):
        LaidOutScales(torch.zeros(6, dtype=torch.uint8), ScaleLayout.TILES_128X4, 3, 2)
