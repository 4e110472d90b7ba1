"""MXFP8: the format that everything else here stands on.

What it is. OCP Microscaling v1.0 stores a tensor as 8-bit floats in blocks of 32 along the last dimension K. Each block has
one scale byte `e` of the type E8M0, which means the power of two 2^(e - 127). An element is an E4M3 float `q` (sign, four
exponent bits, three mantissa bits; largest finite value 448, smallest subnormal 2^-9, no infinity), and its value is
`q * 2^(e - 127)`. Storage is 33/32 bytes an element, against two for bf16.

Which scale. Two rules turn the largest magnitude `amax` of a block into its scale:

- `ScaleRule.CEIL`: the smallest power of two that is at least `amax / 448`. No element saturates. This is the default, and
  what transformers, ModelOpt and the vendors' libraries write.
- `ScaleRule.FLOOR`: `2^(floor(log2 amax) - 8)`, the rule in the OCP text. Blocks whose largest element lies between 448 and
  512 scaled units saturate; CEIL gives these the next larger scale, and all other blocks the same one. FLOOR is the worse of
  the two in perplexity, because the elements that it clips are the largest ones.

Both are computed on the bits of fp32 numbers, never by a logarithm: `log2` in fp32 rounds values just above a power of two
down to it, and a scale that is too small by a factor of two clips.

Corner cases. A block of zeros gets the byte 127 (a scale of one), so that its product is zero and not NaN. The CEIL rule
never goes below byte 1 (2^-126), the smallest normal fp32 number, so fp32 subnormals are rounded to multiples of 2^-135;
FLOOR goes down to byte 0 (2^-127). The byte 255 is NaN and is never written. NaN and infinity in the input are refused. An
fp32 or bf16 magnitude that rounds to 2^128, over 0.96 times the largest finite one, decodes to infinity in fp32. A K that is no
multiple of 32 ends in a shorter block: the missing elements count as zeros, which changes no scale and no product.

Folding. A tensor core without MX instructions cannot apply a scale every 32 elements along K, but a scale for each row
costs it nothing. With t[n] the largest block exponent of row n,

    f[n, k] = E4M3(q[n, k] * 2^(e[n, g] - t[n])),    row scale r[n] = 2^t[n]

re-expresses the row under one power of two. The shift changes only the exponent, so it is exact until an element reaches
E4M3's subnormals (spacing 2^-9); the error of an element is at most half of that, 2^-10 * r[n]. Under the CEIL rule the
largest magnitude of the row is over 224 * r[n], so the error is under 4.4e-6 of it, where E4M3's own rounding is up to 2^-4
of an element. Blocks of zeros have no say in t[n]: their scale byte carries no information.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

BLOCK_SIZE = 32
E4M3_MAX = 448.0
SCALE_BIAS = 127
SCALE_NAN = 255

Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and dtype to a tensor whose contents are undefined."""

# Elements that one pass of quantize(), dequantize() or fold() holds in fp32: its temporaries stay in the cache of a CPU core.
_CHUNK_ELEMENTS = 1 << 16


class ScaleRule(Enum):
    """How a block's largest magnitude becomes its scale; see the module's text."""

    CEIL = "ceil"
    FLOOR = "floor"


@dataclass(frozen=True, slots=True)
class MXTensor:
    """A tensor in MXFP8.

    Attributes:
        data: E4M3 elements, `float8_e4m3fn [..., K]`.
        scale: E8M0 bytes, `uint8 [..., ceil(K / 32)]`; a block's scale is 2^(byte - 127).
    """

    data: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        expected = (*self.data.shape[:-1], num_blocks(self.data.shape[-1]))
        if self.data.dtype != torch.float8_e4m3fn or self.scale.dtype != torch.uint8:
            raise ValueError(
                f"MXTensor needs float8_e4m3fn data and uint8 scales, got {self.data.dtype} and {self.scale.dtype}"
            )
        if tuple(self.scale.shape) != expected:
            raise ValueError(f"MXTensor data {tuple(self.data.shape)} needs scales {expected}, got {tuple(self.scale.shape)}")

    @property
    def shape(self) -> torch.Size:
        """Shape of the elements, `[..., K]`."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales."""
        return self.data.nbytes + self.scale.nbytes

    def __getitem__(self, rows: int | slice) -> MXTensor:
        """Select along the first dimension, as a view. K itself is never cut: a cut could fall inside a block."""
        if self.data.ndim < 2:
            raise IndexError("an MXTensor of one dimension has no rows to select")
        return MXTensor(self.data[rows], self.scale[rows])

    def columns(self, start: int, stop: int) -> MXTensor:
        """Columns `start:stop` of K, as a view: the share of one of several devices, which block boundaries must cut.

        Raises:
            ValueError: the cut falls inside a block of 32, whose scale two devices would need.
        """
        for cut in (start, stop):
            if cut % BLOCK_SIZE and cut != self.shape[-1]:
                raise ValueError(f"columns {start} to {stop} of {self.shape[-1]} cut a block of {BLOCK_SIZE} at {cut}")
        return MXTensor(self.data[..., start:stop], self.scale[..., start // BLOCK_SIZE : num_blocks(stop)])


@dataclass(frozen=True, slots=True)
class FoldedTensor:
    """A tensor under one power-of-two scale a row.

    Attributes:
        data: E4M3 elements, `float8_e4m3fn [..., K]`.
        row_scale: E8M0 bytes, `uint8 [...]`; a row's scale is 2^(byte - 127).
        relative_error: Frobenius norm of what folding changed, over that of the MXFP8 tensor; 0 where nothing changed.
        max_error: largest change of an element in units of its row's scale; at most 2^-10.
    """

    data: Tensor
    row_scale: Tensor
    relative_error: float
    max_error: float

    def as_mxtensor(self) -> MXTensor:
        """The same values in MXFP8, every block of a row under the row's scale."""
        blocks = num_blocks(self.data.shape[-1])
        return MXTensor(self.data, self.row_scale.unsqueeze(-1).expand(*self.row_scale.shape, blocks).contiguous())


def num_blocks(k: int) -> int:
    """Scale blocks that a row of `k` elements needs."""
    return -(-k // BLOCK_SIZE)


def empty(shape: tuple[int, ...], allocate: Allocate | None = None) -> MXTensor:
    """An MXTensor of this shape whose contents are undefined, for `quantize(..., out=...)` to fill.

    Args:
        shape: of the elements, `[..., K]`.
        allocate: shape and dtype to a tensor; None takes ordinary memory of the CPU.
    """
    allocate = allocate or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
    return MXTensor(allocate(shape, torch.float8_e4m3fn), allocate((*shape[:-1], num_blocks(shape[-1])), torch.uint8))


def quantize(w: Tensor, rule: ScaleRule = ScaleRule.CEIL, *, out: MXTensor | None = None) -> MXTensor:
    """Quantize to MXFP8 along the last dimension, from the values as they are: fp16 and fp32 never pass through bf16.

    Args:
        w: `[..., K]` in fp32, bf16 or fp16.
        rule: how a block's scale is chosen.
        out: where to write, of the shape of `w`; a view into a larger tensor will do.

    Raises:
        ValueError: NaN or infinity in `w`, naming the first index; a dtype or a shape that does not fit.
    """
    if w.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize takes float32, bfloat16 or float16, got {w.dtype}")
    if w.ndim == 0:
        raise ValueError("quantize takes a tensor of at least one dimension, got a scalar")
    if out is None:
        out = empty(tuple(w.shape), lambda shape, dtype: torch.empty(shape, dtype=dtype, device=w.device))
    if out.shape != w.shape:
        raise ValueError(f"quantize was given {tuple(w.shape)} to write into {tuple(out.shape)}")
    k = w.shape[-1]
    if w.numel() == 0:
        return out
    rows = w.reshape(-1, k)
    data = out.data.view(-1, k)
    scale = out.scale.view(-1, num_blocks(k))
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        values = _blocks(rows[chunk].float())  # [R, G, 32]
        amax = values.abs().amax(dim=-1)  # [R, G]
        if not bool(torch.isfinite(amax).all()):
            raise ValueError(_not_finite(w))
        exponent = _scale_bytes(amax, rule)  # [R, G] int32
        scaled = (values * _power_of_two(2 * SCALE_BIAS - exponent).unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX)
        data[chunk] = scaled.flatten(1)[:, :k].to(torch.float8_e4m3fn)
        scale[chunk] = exponent.to(torch.uint8)
    return out


def dequantize(mx: MXTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values `[..., K]` of an MXTensor: exact in fp32 below 2^128, and in bf16 while scale exponents lie in -124..119."""
    k = mx.shape[-1]
    out = torch.empty(mx.shape, dtype=dtype, device=mx.data.device)
    if out.numel() == 0:
        return out
    data, scale, rows = mx.data.reshape(-1, k), mx.scale.reshape(-1, num_blocks(k)), out.view(-1, k)
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        values = _blocks(data[chunk].float())
        factors = _power_of_two(scale[chunk].int())
        factors = torch.where(scale[chunk] == SCALE_NAN, torch.nan, factors)
        rows[chunk] = (values * factors.unsqueeze(-1)).flatten(1)[:, :k]
    return out


def fold(mx: MXTensor) -> FoldedTensor:
    """Re-express every row under one power-of-two scale; the module's text has the formula and the bound.

    Raises:
        ValueError: an element or a scale of `mx` is NaN.
    """
    k = mx.shape[-1]
    out = torch.empty_like(mx.data)
    row_scale = torch.empty(mx.shape[:-1], dtype=torch.uint8, device=mx.data.device)
    if out.numel() == 0:
        return FoldedTensor(out, row_scale.fill_(SCALE_BIAS), 0.0, 0.0)
    data, scale = mx.data.reshape(-1, k), mx.scale.reshape(-1, num_blocks(k))
    folded_rows, row_bytes = out.view(-1, k), row_scale.view(-1)
    changed, total, worst = 0.0, 0.0, 0.0
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, data.shape[0], step):
        chunk = slice(start, start + step)
        values = _blocks(data[chunk].float())  # [R, G, 32]
        exponent = scale[chunk].int()  # [R, G]
        if bool(values.isnan().any()) or bool((exponent == SCALE_NAN).any()):
            raise ValueError("fold takes finite values, got NaN among the elements or scales")
        is_zero = (values == 0).all(dim=-1)
        row = torch.where(is_zero, -1, exponent).amax(dim=-1)  # [R]
        row = torch.where(row < 0, SCALE_BIAS, row)
        shift = torch.where(is_zero, 0, exponent - row.unsqueeze(-1))  # [R, G], at most 0
        exact = values.double() * torch.exp2(shift.double()).unsqueeze(-1)  # in units of the row's scale
        rounded = exact.float().to(torch.float8_e4m3fn)
        folded_rows[chunk] = rounded.flatten(1)[:, :k]
        row_bytes[chunk] = row.to(torch.uint8)
        error = (rounded.double() - exact).abs_()
        weight = torch.exp2((row - SCALE_BIAS).double())
        changed += float((error.square().sum(dim=(1, 2)) * weight.square()).sum())
        total += float((exact.square().sum(dim=(1, 2)) * weight.square()).sum())
        worst = max(worst, float(error.max()))
    return FoldedTensor(out, row_scale, (changed / total) ** 0.5 if changed else 0.0, worst)


def sqnr_db(w: Tensor, mx: MXTensor) -> float:
    """Signal to quantization noise of `mx` against the values `w` it came from, in dB; infinite where it is exact."""
    signal, noise = 0.0, 0.0
    k = w.shape[-1]
    rows = w.reshape(-1, k)
    flat = MXTensor(mx.data.reshape(-1, k), mx.scale.reshape(-1, num_blocks(k)))
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, rows.shape[0], step):
        values = rows[start : start + step].double()
        signal += float(values.square().sum())
        noise += float((dequantize(flat[start : start + step]).double() - values).square().sum())
    if noise == 0.0:
        return float("inf")
    return float("-inf") if signal == 0.0 else 10.0 * float(torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))


def _blocks(rows: Tensor) -> Tensor:
    """`[R, K]` as `[R, G, 32]`, padded with zeros; a view of the input where no padding is needed."""
    pad = -rows.shape[-1] % BLOCK_SIZE
    if pad:
        rows = torch.nn.functional.pad(rows, (0, pad))
    return rows.reshape(rows.shape[0], -1, BLOCK_SIZE)


def _scale_bytes(amax: Tensor, rule: ScaleRule) -> Tensor:
    """Biased scale exponents, int32 of the shape of `amax` (fp32, finite)."""
    if rule is ScaleRule.CEIL:
        smallest_normal = torch.finfo(torch.float32).tiny
        ratio = (amax / E4M3_MAX).clamp_(min=smallest_normal)
        # Anything above a power of two carries into the exponent field; the power of two itself does not.
        exponent = (ratio.view(torch.int32) + 0x007FFFFF) >> 23
    else:
        exponent = ((amax.view(torch.int32) >> 23) - 8).clamp_(min=0)
    return torch.where(amax == 0, SCALE_BIAS, exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) in fp32 from biased exponents 0..254 (int32), by its bits; 0 is the subnormal 2^-127."""
    return torch.where(exponent == 0, 0x00400000, exponent << 23).view(torch.float32)


def _not_finite(w: Tensor) -> str:
    index = tuple(int(i) for i in (~torch.isfinite(w)).nonzero()[0])
    return f"quantize takes finite values, got {float(w[index])} at index {list(index)}"
