"""A weight as the loader fills it: storage that parts of a checkpoint arrive in, quantized on arrival or kept.

Storage is made when the first part arrives, and a part is quantized straight into its place, so nothing is held twice. A part
that is quantized in the file already is copied to the same place: after loading the two cannot be told apart. A weight
remembers the storage that its backend computes with in place, but does not keep it alive: loading again writes into the same
memory where it is still in use, and makes new memory where the backend has only a layout of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eightfold.kernels.storage import Arena
from eightfold.quant import fp8, mxfp8
from eightfold.quant.fp8 import FP8Tensor, WeightTensor
from eightfold.quant.mxfp8 import Allocate, MXTensor, ScaleRule
from eightfold.quant.policy import Decision, Role

# Elements of a tensor that is kept which are checked and copied at once.
_CHECKED_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint, and where it goes.

    Attributes:
        name: its name.
        shape: the shape that it must have.
        place: selections along the first dimension, one after another, that lead to its place in the weight.
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]

    @property
    def layer(self) -> str:
        """The layer that it belongs to, by the checkpoint's name for it."""
        return self.name.rpartition(".")[0]


class Weight:
    """One tensor of the model, made of one or more tensors of the checkpoint stacked along the first dimension.

    Attributes:
        name: the fused name, such as "model.layers.0.self_attn.qkv_proj.weight".
        role: what it is to the model, for the policy.
        shape: shape of the whole.
        parts: the checkpoint's tensors, in order.
        decision: quantized or not, and why; set by `load`.
    """

    def __init__(self, name: str, role: Role, parts: Mapping[str, int], *dims: int) -> None:
        self.name = name
        self.role = role
        self.shape = (sum(parts.values()), *dims)
        self.decision = Decision(False, "not loaded")
        self.parts = tuple(Part(part, (rows.stop - rows.start, *dims), (rows,)) for part, rows in _stack(parts))
        self._value: WeightTensor | None = None
        self._form: object = None
        self._arrived: set[str] = set()
        self._lent: tuple[weakref.ref[Tensor], ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the parts that have not arrived."""
        return tuple(part.name for part in self.parts if part.name not in self._arrived)

    @property
    def layers(self) -> tuple[str, ...]:
        """The checkpoint's layers behind the parts."""
        return tuple(part.layer for part in self.parts)

    def choose_spelling(self, present: Callable[[str], bool]) -> None:
        """Settle on the names that a checkpoint has, where there is a choice; `present` says whether it has one."""

    def cut(self, part: Part, shape: Sequence[int]) -> str | None:
        """Why a tensor of another shape than the part's will do all the same, in a few words; None where it will not."""
        del part, shape
        return None

    @property
    def in_use(self) -> bool:
        """Whether a backend computes with the memory that this weight was loaded into."""
        return bool(self._lent) and all(reference() is not None for reference in self._lent)

    def begin(self) -> None:
        """Expect all parts, anew."""
        self._value = None
        self._arrived.clear()

    def load(
        self, part: Part, tensor: WeightTensor, *, decision: Decision, rule: ScaleRule, dtype: torch.dtype, arena: Arena
    ) -> None:
        """Take one part in: copy it where it is quantized already, else quantize it from its own values or copy it as `dtype`.

        Raises:
            ValueError: NaN or infinity in `tensor`, or a form that the parts before it did not have.
        """
        if self._value is None:
            self._value, self.decision = self._storage(tensor, decision, dtype, arena), decision
        if isinstance(tensor, FP8Tensor) and isinstance(self._value, FP8Tensor) and tensor.input_scale is not None:
            # A fused product has one input; the largest scale clips none of its parts.
            largest = max(tensor.input_scale, self._value.input_scale or 0.0)
            self._value = replace(self._value, input_scale=largest)
        for target, source in self._pieces(self._value, part, tensor):
            if isinstance(target, Tensor) and isinstance(source, Tensor):
                _copy_finite(source, target)
            elif isinstance(target, MXTensor) and isinstance(source, Tensor):
                mxfp8.quantize(source.to(arena.device), rule, out=target)
            elif isinstance(target, Tensor) or isinstance(source, Tensor):
                raise ValueError(f"{type(source).__name__} for a weight that is kept as {type(target).__name__}")
            else:
                fp8.copy(source, target)
        self._arrived.add(part.name)

    def place(self, part: Part, *, decision: Decision, dtype: torch.dtype, arena: Arena) -> WeightTensor:
        """Where one part lies, MXFP8 if it is to be quantized, else `dtype`. Whoever asks writes it: it counts as arrived."""
        if self._value is None:
            self._value, self.decision = self._storage(torch.empty(0), decision, dtype, arena), decision
        self._arrived.add(part.name)
        return _at(self._value, part.place)

    def fold(self) -> None:
        """Replace a quantized value by its folded form, for measuring what folding changes."""
        if isinstance(self._value, MXTensor):
            self._value = mxfp8.fold(self._value).as_mxtensor()

    def take(self) -> WeightTensor:
        """Hand the whole weight over; this object keeps no reference, so that a repacked copy replaces it.

        Raises:
            RuntimeError: a part is missing, or it was taken before.
        """
        if self._value is None or self.missing:
            raise RuntimeError(f"{self.name} is not whole: {', '.join(self.missing) or 'taken before'}")
        value, self._value = self._value, None
        self._lent = tuple(weakref.ref(tensor) for tensor in _tensors(value))
        return value

    def take_dense(self) -> Tensor:
        """`take()` of a weight that the policy never quantizes."""
        value = self.take()
        if not isinstance(value, Tensor):
            raise RuntimeError(f"{self.name} is quantized, and its layer needs it dense")
        return value

    def _storage(self, tensor: WeightTensor, decision: Decision, dtype: torch.dtype, arena: Arena) -> WeightTensor:
        """Where the weight will lie: the memory that a backend computes with already, else new one."""
        form: object = decision.quantized or dtype  # quantized on arrival or in the file: both are MXFP8
        if isinstance(tensor, FP8Tensor):
            form = ("fp8", tensor.scale.shape[-1])
        lent = [item for item in (reference() for reference in self._lent) if item is not None]
        allocate = _lender(lent) if form == self._form and len(lent) == len(self._lent) > 0 else arena.empty
        self._form = form
        if not isinstance(tensor, Tensor):
            return fp8.empty_like(tensor, self.shape, allocate)
        return mxfp8.empty(self.shape, allocate) if decision.quantized else allocate(self.shape, dtype)

    def _pieces(self, value: WeightTensor, part: Part, tensor: WeightTensor) -> Iterator[tuple[WeightTensor, WeightTensor]]:
        """Places in the weight, and what of a part goes there."""
        yield _at(value, part.place), tensor


class ExpertWeight(Weight):
    """A projection of all experts, `[E, rows, K]`: of one kind, or gates before ups.

    A checkpoint has it as a tensor for each expert and projection, or as one tensor of all, which is how transformers holds it.
    Some exporters pad the inner width of the experts. Rows beyond it are cut off, since those of W2 have no columns for them.

    Attributes:
        num_experts: E.
        rows: rows of one projection of one expert.
    """

    def __init__(
        self, name: str, projections: Sequence[str], num_experts: int, rows: int, in_features: int, *, may_be_padded: bool
    ) -> None:
        """Name the projections: `{name}.{expert}.{projection}.weight` on disk, or `{name}.{fused}`.

        Args:
            name: the experts' name in the checkpoint, such as "backbone.layers.1.mixer.experts".
            projections: such as ("gate_proj", "up_proj"); the fused tensor has their names joined as "gate_up_proj".
            num_experts: E.
            rows: of one projection.
            in_features: K.
            may_be_padded: whether the rows are the inner width, which may come padded.
        """
        self.num_experts, self.rows, self._may_be_padded = num_experts, rows, may_be_padded
        fused = "_".join([item.removesuffix("_proj") for item in projections]) + "_proj"
        super().__init__(f"{name}.{fused}", Role.EXPERTS, {}, in_features)
        self.shape = (num_experts, len(projections) * rows, in_features)
        self._fused = (Part(f"{name}.{fused}", self.shape, (slice(0, num_experts),)),)
        self.parts = tuple(
            Part(f"{name}.{expert}.{projection}.weight", (rows, in_features), (expert, slice(start, start + rows)))
            for expert in range(num_experts)
            for projection, start in zip(projections, range(0, self.shape[1], rows), strict=True)
        )

    def choose_spelling(self, present: Callable[[str], bool]) -> None:
        """Take the fused tensor where the checkpoint has it."""
        if present(self._fused[0].name):
            self.parts = self._fused

    def cut(self, part: Part, shape: Sequence[int]) -> str | None:
        """Say how many rows are cut off an export that is padded."""
        num_projections = self.shape[1] // self.rows if len(part.shape) == 3 else 1
        padded, rest = divmod(shape[-2] if len(shape) == len(part.shape) else 0, num_projections)
        others_fit = (*shape[:-2], shape[-1]) == (*part.shape[:-2], part.shape[-1])
        if not (self._may_be_padded and others_fit and rest == 0 and padded > self.rows):
            return None
        return f"{padded} rows are cut to the {self.rows} that the down projection has columns for"

    def _pieces(self, value: WeightTensor, part: Part, tensor: WeightTensor) -> Iterator[tuple[WeightTensor, WeightTensor]]:
        """One projection of one expert at a time, without the rows that pad it."""
        if len(tensor.shape) == 2:
            yield _at(value, part.place), tensor[: self.rows]
            return
        num_projections = self.shape[1] // self.rows
        stored = tensor.shape[1] // num_projections
        for expert in range(self.num_experts):
            for index in range(num_projections):
                place = (expert, slice(index * self.rows, (index + 1) * self.rows))
                yield _at(value, place), tensor[expert][index * stored : index * stored + self.rows]


def _copy_finite(source: Tensor, target: Tensor) -> None:
    """Copy, some rows at a time: the check of a whole embedding would take more memory than the embedding."""
    rows = max(1, _CHECKED_ELEMENTS // max(1, source[:1].numel()))
    for start in range(0, len(source), rows):
        chunk = source[start : start + rows]
        if not bool(torch.isfinite(chunk).all()):
            raise ValueError("NaN or infinity")
        target[start : start + rows].copy_(chunk)


def _stack(parts: Mapping[str, int]) -> Iterator[tuple[str, slice]]:
    start = 0
    for name, rows in parts.items():
        yield name, slice(start, start + rows)
        start += rows


def _at(value: WeightTensor, place: Sequence[int | slice]) -> WeightTensor:
    for selection in place:
        value = value[selection]
    return value


def _lender(lent: Sequence[Tensor]) -> Allocate:
    """Give the tensors of a weight that is in use out again, by shape and dtype."""
    rest = {(tuple(tensor.shape), tensor.dtype): tensor for tensor in lent}
    return lambda shape, dtype: rest[shape, dtype]


def _tensors(value: WeightTensor) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else (value.data, value.scale)
