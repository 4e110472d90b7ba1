"""What the bits of an MXFP8 tensor say of how it was made: which scale rule, and how its block exponents are spread.

With amax the largest magnitude of a block and 2^e its scale, the rules of `eightfold.quant.mxfp8` leave the largest element in

    ceil     224 < amax / 2^e <= 448, so at 224 to 448 after rounding
    floor    256 <= amax / 2^e < 512, so at 256 to 448 after rounding and saturation

so a block whose largest element is 224 or 240 was made by ceil, and one that stays below 224 by neither. Elements from 248 on
are rounded to 256; where mantissas are spread evenly on a logarithmic scale, log2(248 / 224) = 15 % of the blocks under ceil
are of the first kind. Blocks of zeros, and those whose scale is as small as a rule makes one, say nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from eightfold.quant.mxfp8 import BLOCK_SIZE, SCALE_BIAS, SCALE_NAN, MXTensor, num_blocks

FoundRule: TypeAlias = Literal["ceil", "floor", "another", "unknown"]
# With so many blocks, none of them at 224 or 240, the chance that ceil made them is (1 - 0.15)^100 = 1e-7.
_ENOUGH_BLOCKS = 100
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was counted over the blocks of one tensor or several.

    Attributes:
        exponents: scale exponents to numbers of blocks, without blocks of zeros.
        by_ceil: blocks whose largest element is 224 or 240.
        by_either: those at 256 to 448.
        by_neither: those below 224.
    """

    exponents: Mapping[int, int] = field(default_factory=dict)
    by_ceil: int = 0
    by_either: int = 0
    by_neither: int = 0

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(
            dict(Counter(self.exponents) + Counter(other.exponents)),
            self.by_ceil + other.by_ceil,
            self.by_either + other.by_either,
            self.by_neither + other.by_neither,
        )

    @property
    def rule(self) -> FoundRule:
        """The rule that made the blocks; "another" where none of ours leaves such blocks, "unknown" where they are too few."""
        if self.by_neither:
            return "another"
        if self.by_ceil:
            return "ceil"
        return "floor" if self.by_either >= _ENOUGH_BLOCKS else "unknown"


def evidence_of(mx: MXTensor) -> Evidence:
    """Count the blocks of a tensor."""
    k = mx.shape[-1]
    if mx.data.numel() == 0:
        return Evidence()
    data, scale = mx.data.reshape(-1, k), mx.scale.reshape(-1, num_blocks(k))
    counts = torch.zeros(SCALE_NAN + 1, dtype=torch.int64)
    found = Evidence()
    rows = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, len(data), rows):
        magnitudes = data[start : start + rows].float().abs()
        padded = torch.nn.functional.pad(magnitudes, (0, -k % BLOCK_SIZE))
        amax = padded.unflatten(1, (-1, BLOCK_SIZE)).amax(dim=2).flatten()  # [blocks]
        byte = scale[start : start + rows].flatten().long()
        counts += torch.bincount(byte[amax > 0], minlength=len(counts)).cpu()
        told = amax[(amax > 0) & (byte > 1)]
        by_ceil, by_neither = int(((told >= 224) & (told < 256)).sum()), int((told < 224).sum())
        found = found + Evidence({}, by_ceil, len(told) - by_ceil - by_neither, by_neither)
    exponents = {byte - SCALE_BIAS: count for byte, count in enumerate(counts.tolist()) if count}
    return Evidence(exponents, found.by_ceil, found.by_either, found.by_neither)
