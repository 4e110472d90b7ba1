"""A weight as the loader fills it: storage that parts of a checkpoint arrive in, quantized on arrival or kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eightfold.kernels.storage import Arena
from eightfold.quant import mxfp8
from eightfold.quant.mxfp8 import MXTensor, ScaleRule
from eightfold.quant.policy import Decision, Role


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint, and the rows of the fused weight that it fills."""

    name: str
    rows: slice


class Weight:
    """One tensor of the model, made of one or more tensors of the checkpoint stacked along the first dimension.

    Attributes:
        name: the fused name, such as "model.layers.0.self_attn.qkv_proj.weight".
        role: what it is to the model, for the policy.
        shape: shape of the whole.
        parts: the checkpoint's tensors, in order.
        decision: quantized or not, and why; set by `allocate`.
    """

    def __init__(self, name: str, role: Role, parts: dict[str, int], *dims: int) -> None:
        self.name = name
        self.role = role
        self.shape = (sum(parts.values()), *dims)
        ends = [sum(list(parts.values())[: i + 1]) for i in range(len(parts))]
        starts_ends = zip([0, *ends], ends, strict=False)
        self.parts = tuple(Part(part, slice(start, end)) for part, (start, end) in zip(parts, starts_ends, strict=True))
        self.decision = Decision(False, "not loaded")
        self._value: MXTensor | Tensor | None = None
        self._missing = {part.name for part in self.parts}

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the parts that have not arrived."""
        return tuple(part.name for part in self.parts if part.name in self._missing)

    @property
    def layers(self) -> tuple[str, ...]:
        """The checkpoint's layer names behind the parts: the names without their last word."""
        return tuple(part.name.rpartition(".")[0] for part in self.parts)

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """Shape that the checkpoint's tensor must have."""
        return (part.rows.stop - part.rows.start, *self.shape[1:])

    def load(
        self, part: Part, tensor: Tensor, *, decision: Decision, rule: ScaleRule, dtype: torch.dtype, arena: Arena
    ) -> None:
        """Take one part in: quantize it from its own values, or copy it as `dtype`.

        Storage for the whole weight is made when its first part arrives.

        Raises:
            ValueError: NaN or infinity in `tensor`.
        """
        if self._value is None:
            self.decision = decision
            self._value = mxfp8.empty(self.shape, arena.empty) if decision.quantized else arena.empty(self.shape, dtype)
        if isinstance(self._value, MXTensor):
            mxfp8.quantize(tensor.to(arena.device), rule, out=self._value[part.rows])
        else:
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError("NaN or infinity")
            self._value[part.rows].copy_(tensor)
        self._missing.discard(part.name)

    def fold(self) -> None:
        """Replace a quantized value by its folded form, for measuring what folding changes."""
        if isinstance(self._value, MXTensor):
            self._value = mxfp8.fold(self._value).as_mxtensor()

    def take(self) -> MXTensor | Tensor:
        """Hand the whole weight over; this object keeps no reference, so that a repacked copy replaces it.

        Raises:
            RuntimeError: a part is missing, or it was taken before.
        """
        if self._value is None or self._missing:
            raise RuntimeError(f"{self.name} is not whole: {', '.join(self.missing) or 'taken before'}")
        value, self._value = self._value, None
        return value

    def take_dense(self) -> Tensor:
        """`take()` of a weight that the policy never quantizes."""
        value = self.take()
        if isinstance(value, MXTensor):
            raise RuntimeError(f"{self.name} is quantized, and its layer needs it dense")
        return value
