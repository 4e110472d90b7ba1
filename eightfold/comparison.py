"""Two checkpoints, tensor by tensor: what only one of them has, and how far the rest is apart, in whichever dialects they are.

A weight is compared with its scales, so that MXFP8 from one exporter meets MXFP8 from another, or the bf16 that both came from.
Names are those that the model uses, and experts in one tensor are taken apart into those that other files have one by one. Two
tensors are open at a time, and of their values as many rows as make a million elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from eightfold.models.checkpoint import Checkpoint
from eightfold.models.loader import open_checkpoint
from eightfold.models.stored import Stored, describe, read_stored
from eightfold.quant.checkpoints import INPUT_SCALES, KV_SCALE, SCALE_SUFFIXES
from eightfold.quant.fp8 import FP8Tensor, WeightTensor, widen
from eightfold.quant.mxfp8 import MXTensor

Outcome: TypeAlias = Literal["only in A", "only in B", "shapes differ", "same bits", "same values", "different"]
"""In "same bits" elements, scales and data types are equal; in "same values" what they stand for is."""
EQUAL: frozenset[Outcome] = frozenset({"same bits", "same values"})
# Elements of each of two tensors that are widened to fp32 at once.
_CHUNK_ELEMENTS = 1 << 20
_FUSED_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.(?P<projections>gate_up|gate|up|down)_proj")


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """One tensor of either checkpoint.

    Attributes:
        name: by the model's name for it.
        outcome: how A's and B's relate.
        forms: what A and B have: "mxfp8", "fp8", the name of a dtype, or "" for nothing.
        shapes: the two shapes; None for nothing.
        sqnr_db: A's signal over the difference of the two, in dB: infinite where the values are equal, NaN where one is;
            None where the two cannot be subtracted.
        max_difference: the largest difference of two elements; None alike.
    """

    name: str
    outcome: Outcome
    forms: tuple[str, str]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    sqnr_db: float | None = None
    max_difference: float | None = None


class StoredTensors:
    """The weights of a checkpoint folder by name, each read when it is asked for, experts one by one.

    Args:
        path: the folder.

    Attributes:
        shapes: name to shape, in the order of the files.

    Raises:
        CheckpointError: files that are missing, damaged or disagree with the configuration, by tensor.
    """

    def __init__(self, path: Path) -> None:
        self._checkpoint: Checkpoint = open_checkpoint(path)
        self._places: dict[str, tuple[Stored, tuple[int | slice, ...]]] = {}
        self._last: tuple[str, WeightTensor] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, info in self._checkpoint.tensors.items():
            if name.endswith((*SCALE_SUFFIXES, *INPUT_SCALES)) or KV_SCALE.search(name):
                continue
            stored = describe(self._checkpoint, info, quantizable=False)
            for part, shape, place in _parts(name, info.shape):
                self._places[part] = stored, place
                self.shapes[part] = shape

    def __getitem__(self, name: str) -> WeightTensor:
        """One weight, as a view of the mapped file: copy from it, do not keep it.

        Raises:
            CheckpointError: a scale that does not fit, by name.
        """
        stored, place = self._places[name]
        # The experts of one tensor come one after another, and its scales need not be read for each of them.
        if self._last is None or self._last[0] != stored.info.name:
            self._last = stored.info.name, read_stored(self._checkpoint, stored, self._checkpoint.read_one(stored.info.name))
        value = self._last[1]
        for selection in place:
            value = value[selection]
        return value

    def form(self, name: str) -> str:
        """ "mxfp8", "fp8", or the dtype in safetensors' spelling, in small letters."""
        stored, _ = self._places[name]
        return stored.format or stored.info.dtype.lower()


def compare(a: Path, b: Path) -> Iterator[TensorComparison]:
    """Compare the checkpoints of two folders, in the order of A's files; what only B has comes last.

    Raises:
        CheckpointError: one of them cannot be read, before the first comparison.
    """
    first, second = StoredTensors(a), StoredTensors(b)
    return _compare(first, second)


def _compare(first: StoredTensors, second: StoredTensors) -> Iterator[TensorComparison]:
    for name, shape in first.shapes.items():
        if name not in second.shapes:
            yield TensorComparison(name, "only in A", (first.form(name), ""), (shape, None))
            continue
        forms, shapes = (first.form(name), second.form(name)), (shape, second.shapes[name])
        if shapes[0] != shapes[1]:
            yield TensorComparison(name, "shapes differ", forms, shapes)
            continue
        left, right = first[name], second[name]
        if same_bits(left, right):
            yield TensorComparison(name, "same bits", forms, shapes, math.inf, 0.0)
            continue
        sqnr, largest = difference(left, right)
        outcome: Outcome = "same values" if largest == 0.0 else "different"
        yield TensorComparison(name, outcome, forms, shapes, sqnr, largest)
    for name, shape in second.shapes.items():
        if name not in first.shapes:
            yield TensorComparison(name, "only in B", ("", second.form(name)), (None, shape))


def same_bits(a: WeightTensor, b: WeightTensor) -> bool:
    """Whether two weights of one shape have the same form, elements and scales, bit by bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, MXTensor | FP8Tensor) and isinstance(b, MXTensor | FP8Tensor) and type(a) is type(b):
        scales = a.scale.shape == b.scale.shape and torch.equal(_bytes(a.scale), _bytes(b.scale))
        return scales and torch.equal(_bytes(a.data), _bytes(b.data))
    return False


def difference(a: WeightTensor, b: WeightTensor) -> tuple[float, float]:
    """How far `b` is from `a`, of the same shape: 10 log10(sum a^2 / sum (a - b)^2) in dB, and the largest |a - b|."""
    if len(a.shape) < 2:
        return _ratio(*_sums(widen(a), widen(b)))
    rows = max(1, _CHUNK_ELEMENTS // max(1, math.prod(a.shape[1:])))
    signal, noise, largest = 0.0, 0.0, [0.0]
    for start in range(0, a.shape[0], rows):
        chunk = slice(start, start + rows)
        sums = _sums(widen(a[chunk]), widen(b[chunk]))
        signal, noise = signal + sums[0], noise + sums[1]
        largest.append(sums[2])
    return _ratio(signal, noise, math.nan if any(map(math.isnan, largest)) else max(largest))


def _sums(a: Tensor, b: Tensor) -> tuple[float, float, float]:
    """Sum of squares of a, of a - b, and the largest |a - b|, from fp32 tensors."""
    if a.numel() == 0 or torch.equal(a, b):
        return float(a.double().square().sum()), 0.0, 0.0
    apart = a.double() - b.double()
    return float(a.double().square().sum()), float(apart.square().sum()), float(apart.abs().max())


def _ratio(signal: float, noise: float, largest: float) -> tuple[float, float]:
    if math.isnan(largest) or math.isinf(signal):
        return math.nan, largest
    if noise == 0.0:
        return math.inf, largest
    return (-math.inf if signal == 0.0 else 10.0 * math.log10(signal / noise)), largest


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[int | slice, ...]]]:
    """A tensor itself, or each projection of each expert in it: name, shape, and the selections that lead there."""
    match = _FUSED_EXPERTS.fullmatch(name)
    projections: list[str] = match["projections"].split("_") if match is not None else []
    if match is None or len(shape) != 3 or shape[1] % len(projections):
        yield name, shape, ()
        return
    rows = shape[1] // len(projections)
    for expert in range(shape[0]):
        for index, projection in enumerate(projections):
            place = (expert, slice(index * rows, (index + 1) * rows))
            yield f"{match['experts']}.{expert}.{projection}_proj.weight", (rows, shape[2]), place


def worst_different(items: Iterable[TensorComparison]) -> TensorComparison | None:
    """The tensor with the least SQNR among those whose values differ, NaN before all; None where there is none."""
    found = [item for item in items if item.outcome == "different" and item.sqnr_db is not None]
    return min(found, key=lambda item: -math.inf if math.isnan(item.sqnr_db or 0.0) else item.sqnr_db or 0.0, default=None)
