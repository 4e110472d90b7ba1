"""Where the scales of MXFP8 blocks lie in memory: the layouts that block-scaled products read, as types.

A product that reads scales in another order than they lie in gives plausible and slightly wrong numbers. So scales never
travel as a bare tensor: `LaidOutScales` carries the layout, and whoever reads it asks for the one it needs. With row r, block c
of K, and C the blocks of a row padded to a multiple of 4:

- LINEAR: `r * blocks + c`, without padding.
- TILES_128X4 (cuBLAS, CUTLASS): tiles of 128 rows and 4 blocks, `(r // 128) * 128 * C + (c // 4) * 512 + (r % 32) * 16 +
  (r % 128 // 32) * 4 + c % 4`; rows are padded to a multiple of 128.
- TILES_8X4 (TensorRT-LLM, few tokens): tiles of 8 rows and 4 blocks, `(r // 8) * 8 * C + (c // 4) * 32 + (r % 8) * 4 + c % 4`;
  rows are padded to a multiple of 8.

Padding is the byte 127, a scale of one: a padded block has zeros as elements, and 255 would make NaN of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from eightfold.quant.mxfp8 import SCALE_BIAS


class ScaleLayout(Enum):
    """How scales lie; the module's text has the formulas."""

    LINEAR = "linear"
    TILES_128X4 = "128x4"
    TILES_8X4 = "8x4"

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and blocks of a tile, to whose multiples both are padded."""
        return {"linear": (1, 1), "128x4": (128, 4), "8x4": (8, 4)}[self.value]

    def padded(self, rows: int, blocks: int) -> tuple[int, int]:
        """Rows and blocks with their padding."""
        tile_rows, tile_blocks = self.tile
        return -(-rows // tile_rows) * tile_rows, -(-blocks // tile_blocks) * tile_blocks


@dataclass(frozen=True, slots=True)
class LaidOutScales:
    """Scales of a matrix in MXFP8, in a known order.

    Attributes:
        data: `uint8 [R * C]` with R and C padded as the layout asks.
        layout: the order.
        rows: rows of the matrix.
        blocks: blocks of a row.
    """

    data: Tensor
    layout: ScaleLayout
    rows: int
    blocks: int

    def __post_init__(self) -> None:
        rows, blocks = self.layout.padded(self.rows, self.blocks)
        if self.data.dtype != torch.uint8 or tuple(self.data.shape) != (rows * blocks,):
            raise ValueError(
                f"{self.layout.value} scales of {self.rows} x {self.blocks} blocks need uint8 [{rows * blocks}], "
                f"got {self.data.dtype} {list(self.data.shape)}"
            )

    def need(self, layout: ScaleLayout) -> Tensor:
        """The bytes, for one who reads `layout`.

        Raises:
            ValueError: they lie in another order.
        """
        if self.layout is not layout:
            raise ValueError(f"scales lie in the layout {self.layout.value}, and {layout.value} is read")
        return self.data


def arrange(scale: Tensor, layout: ScaleLayout) -> LaidOutScales:
    """Scales `uint8 [R, blocks]`, row by row, in `layout`. A view where that is LINEAR and `scale` is contiguous."""
    rows, blocks = scale.shape
    if layout is ScaleLayout.LINEAR:
        return LaidOutScales(scale.reshape(-1), layout, rows, blocks)
    high, wide = layout.padded(rows, blocks)
    full = torch.nn.functional.pad(scale, (0, wide - blocks, 0, high - rows), value=SCALE_BIAS)
    if layout is ScaleLayout.TILES_128X4:
        tiles = full.view(high // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
    else:
        tiles = full.view(high // 8, 8, wide // 4, 4).permute(0, 2, 1, 3)
    return LaidOutScales(tiles.reshape(-1), layout, rows, blocks)
