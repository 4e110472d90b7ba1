"""What quantizing a checkpoint would do to it, tensor by tensor, without ever holding more than one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eightfold.config import EngineConfig, default_dtype
from eightfold.errors import CheckpointError
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import LinearBackend
from eightfold.kernels.registry import Choice, Declined
from eightfold.kernels.selection import Kernels
from eightfold.layers.attention import Attention
from eightfold.layers.linear import Linear
from eightfold.layers.module import Module
from eightfold.models.checkpoint import Checkpoint
from eightfold.models.loader import plan, read_model
from eightfold.quant.mxfp8 import ScaleRule, fold, quantize, sqnr_db
from eightfold.quant.policy import Decision, Policy
from eightfold.types import Progress


@dataclass(frozen=True, slots=True)
class TensorInspection:
    """What would become of one tensor.

    Attributes:
        name: its name in the checkpoint.
        shape: its shape.
        decision: quantized or not, and why.
        bytes_before: bytes in the file.
        bytes_after: bytes in memory.
        sqnr_db: signal to quantization noise in dB, infinite where nothing was lost; None where it is not quantized.
        fold_error: relative Frobenius error of folding it, as `quant.mxfp8.fold` has it; None where it is not quantized.
        backend: what would compute with it; None where it is no operand of a product.
        declined: the backends that are preferred to that one, and why each declines.
    """

    name: str
    shape: tuple[int, ...]
    decision: Decision
    bytes_before: int
    bytes_after: int
    sqnr_db: float | None
    fold_error: float | None
    backend: str | None
    declined: tuple[Declined, ...]


@dataclass(frozen=True, slots=True)
class BackendUse:
    """A backend, what it computes, and how often.

    Attributes:
        operation: "linear" with the format of the weights, or "attention".
        backend: its name.
        declined: the backends that are preferred to it, and why each declines.
        count: layers that use it.
    """

    operation: str
    backend: str
    declined: tuple[Declined, ...]
    count: int


class Inspection:
    """A checkpoint whose headers were read and whose tensors can be looked at.

    Args:
        config: the model, and how it would be loaded.
        report: told about downloads and conversion.

    Attributes:
        names: the tensors that `tensors()` will give, in its order.
        skipped: tensors that the model does not need, each with the reason.

    Raises:
        InputError: what would also keep the model from being loaded.
    """

    def __init__(self, config: EngineConfig, *, report: Progress | None = None) -> None:
        path = resolve_model(config.model, revision=config.revision, report=report)
        hardware = detect(config.device)
        dtype = config.dtype if config.dtype != "auto" else default_dtype(hardware.device.type)[0]
        self._rule = ScaleRule(config.scale_rule)
        self._kernels = Kernels(hardware, getattr(torch, dtype), config.fp8_gemm_backend, config.attention_backend)
        _, self._model = read_model(path)
        self._checkpoint = Checkpoint(path)
        policy = Policy(config.quantization, config.quantization_ignored_layers, config.quantize_lm_head)
        self._plan = plan(self._model, self._checkpoint, policy, self._kernels)
        self._choices = self._choose()
        self.names = tuple(name for name in self._checkpoint.tensors for _ in self._plan.destinations.get(name, ()))
        self.skipped = self._plan.skipped

    def tensors(self) -> Iterator[TensorInspection]:
        """Each tensor that goes into the model, read, quantized, measured and dropped; twice where it has two uses.

        Raises:
            CheckpointError: NaN or infinity in a tensor.
        """
        for info, tensor in self._checkpoint.read():
            for index, place in enumerate(self._plan.destinations.get(info.name, ())):
                sqnr, fold_error = self._measure(info.name, tensor) if place.decision.quantized else (None, None)
                _, choice = self._choices.get(id(place.weight), ("", None))
                yield TensorInspection(
                    name=info.name,
                    shape=info.shape,
                    decision=place.decision,
                    bytes_before=info.nbytes if index == 0 else 0,
                    bytes_after=place.nbytes,
                    sqnr_db=sqnr,
                    fold_error=fold_error,
                    backend=None if choice is None else choice.backend.name,
                    declined=() if choice is None else choice.declined,
                )

    def backends(self) -> tuple[BackendUse, ...]:
        """Which backends the model would use."""
        attention = [module for module in self._model.modules() if isinstance(module, Attention)]
        return _count(
            [
                *self._choices.values(),
                *(("attention", self._kernels.attention(module.spec(self._kernels))) for module in attention),
            ]
        )

    def _choose(self) -> dict[int, tuple[str, Choice[LinearBackend]]]:
        """The operation and backend of each dense product, by the identity of the weight that it multiplies with."""
        choices: dict[int, tuple[str, Choice[LinearBackend]]] = {}
        for module in self._model.modules():
            if isinstance(module, Linear):
                places = self._plan.destinations[module.weight.parts[0].name]
                # A tied head that stays as it is multiplies with the embedding.
                place = next((item for item in places if item.weight is module.weight), places[0])
                weight_format = "mxfp8" if place.decision.quantized else str(place.dtype).removeprefix("torch.")
                choice = self._kernels.linear(module.spec(self._kernels, weight_format))
                choices[id(place.weight)] = (f"linear {weight_format}", choice)
        return choices

    def _measure(self, name: str, tensor: Tensor) -> tuple[float, float]:
        """SQNR and fold error of a tensor."""
        values = tensor.to(self._kernels.hardware.device)
        try:
            quantized = quantize(values, self._rule)
        except ValueError as error:
            raise CheckpointError(f"tensor {name}", got=str(error), expected="finite values") from error
        return sqnr_db(values, quantized), fold(quantized).relative_error


def bound_backends(model: Module) -> tuple[BackendUse, ...]:
    """Which backends a loaded model uses."""
    used: list[tuple[str, Choice[Any]]] = []
    for module in model.modules():
        if isinstance(module, Linear) and module.choice is not None:
            used.append(("linear mxfp8" if module.weight.decision.quantized else "linear kept", module.choice))
        elif isinstance(module, Attention) and module.choice is not None:
            used.append(("attention", module.choice))
    return _count(used)


def _count(used: Iterable[tuple[str, Choice[Any]]]) -> tuple[BackendUse, ...]:
    counts = Counter((operation, choice.backend.name, choice.declined) for operation, choice in used)
    return tuple(BackendUse(*use, count) for use, count in counts.items())
