"""What quantizing a checkpoint would do to it, tensor by tensor, without ever holding more than one of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from eightfold.config import EngineConfig, default_dtype
from eightfold.errors import CheckpointError
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.kernels.registry import Declined
from eightfold.kernels.selection import Kernels
from eightfold.layers.module import Chosen, Module
from eightfold.layers.weight import Weight
from eightfold.models.checkpoint import Checkpoint
from eightfold.models.dummy import DummyCheckpoint
from eightfold.models.loader import Destination, check_effect, open_checkpoint, plan, read_model
from eightfold.quant.evidence import Evidence, FoundRule, evidence_of
from eightfold.quant.fp8 import FP8Tensor, WeightTensor
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, fold, quantize, sqnr_db
from eightfold.quant.policy import Decision, Policy
from eightfold.types import Progress

# A layer's name is what a tensor's begins with, up to its number.
_LAYER = re.compile(r".*?\blayers\.\d+")


@dataclass(frozen=True, slots=True)
class TensorInspection:
    """What would become of one tensor, or of one expert in a tensor of all.

    Attributes:
        name: its name in the checkpoint, with the number of the expert in brackets where the tensor holds all.
        shape: its shape.
        decision: quantized or not, and why.
        bytes_before: bytes in the file.
        bytes_after: bytes in memory.
        sqnr_db: signal to quantization noise in dB, infinite where nothing was lost; None where it is not quantized.
        fold_error: relative Frobenius error of folding it, as `quant.mxfp8.fold` has it; None where it is not quantized.
        evidence: what its blocks say in MXFP8; None where it is not quantized.
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
    evidence: Evidence | None
    backend: str | None
    declined: tuple[Declined, ...]


@dataclass(frozen=True, slots=True)
class LayerInspection:
    """What quantizing does to one layer of the model.

    Attributes:
        layer: its name, such as "backbone.layers.3".
        sqnr_db_min: of its worst tensor.
        sqnr_db_mean: over its quantized tensors.
        fold_error_max: of its worst tensor.
        worst: the name of the tensor with the least SQNR.
    """

    layer: str
    sqnr_db_min: float
    sqnr_db_mean: float
    fold_error_max: float
    worst: str


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
        notes: what is worth a line: tensors that are passed over or cut.

    Raises:
        InputError: what would also keep the model from being loaded.
    """

    def __init__(self, config: EngineConfig, *, report: Progress | None = None) -> None:
        path = resolve_model(config.model, revision=config.revision, report=report, needs_weights=config.needs_weights)
        self._rule, self._kernels = ScaleRule(config.scale_rule), kernels_of(config)
        self._model, self._checkpoint = read_model(path), _checkpoint_of(config, path, self._kernels)
        self._plan = plan(self._model, self._checkpoint, policy_of(config), self._kernels)
        check_effect(self._plan, self._kernels, self._rule)
        self._chosen = {id(self._source(weight)): item for item in reversed(self._plan.chosen) for weight in item.weights}
        self.names = tuple(
            info.stored_name for info in self._checkpoint.tensors.values() for _ in self._plan.destinations.get(info.name, ())
        )
        self.skipped, self.notes = self._plan.skipped, self._plan.notes

    def tensors(self) -> Iterator[TensorInspection]:
        """Each tensor that goes into the model, read, quantized, measured and dropped; twice where it has two uses.

        A tensor that holds all experts of a layer comes as one inspection for each of them.

        Raises:
            CheckpointError: NaN or infinity in a tensor.
        """
        for info, tensor in self._checkpoint.read():
            for index, place in enumerate(self._plan.destinations.get(info.name, ())):
                before = place.stored.nbytes if index == 0 else 0
                if place.stored.scheme is not None:
                    yield self._inspect(info.stored_name, place.arriving(self._checkpoint, tensor), place, before, place.nbytes)
                elif tensor.ndim == 3 and place.decision.quantized:
                    share = len(tensor)
                    for expert, values in enumerate(tensor):
                        name = f"{info.stored_name}[{expert}]"
                        yield self._inspect(name, values, place, before // share, place.nbytes // share)
                else:
                    yield self._inspect(info.stored_name, tensor, place, before, place.nbytes)

    def backends(self) -> tuple[BackendUse, ...]:
        """Which backends the model would use."""
        return _count(self._plan.chosen)

    def _inspect(self, name: str, tensor: WeightTensor, place: Destination, before: int, after: int) -> TensorInspection:
        sqnr, fold_error, evidence = self._measure(name, tensor) if place.decision.quantized else (None, None, None)
        chosen = self._chosen.get(id(place.weight))
        return TensorInspection(
            name=name,
            shape=tuple(tensor.shape),
            decision=place.decision,
            bytes_before=before,
            bytes_after=after,
            sqnr_db=sqnr,
            fold_error=fold_error,
            evidence=evidence,
            backend=None if chosen is None else chosen.choice.backend.name,
            declined=() if chosen is None else chosen.choice.declined,
        )

    def _source(self, weight: Weight) -> Weight:
        """Whose storage a weight has: its own, or the embedding's, as a tied head that stays as it is."""
        places = self._plan.destinations[weight.parts[0].name]
        return next((place.weight for place in places if place.weight is weight), places[0].weight)

    def _measure(self, name: str, tensor: WeightTensor) -> tuple[float | None, float | None, Evidence | None]:
        """SQNR, fold error and evidence; no SQNR where the file has it quantized, and nothing where that is not MX."""
        if isinstance(tensor, MXTensor):
            return None, fold(tensor).relative_error, evidence_of(tensor)
        if isinstance(tensor, FP8Tensor):
            return None, None, None
        values = tensor.to(self._kernels.hardware.device)
        try:
            quantized = quantize(values, self._rule)
        except ValueError as error:
            raise CheckpointError(f"tensor {name}", got=str(error), expected="finite values") from error
        return sqnr_db(values, quantized), fold(quantized).relative_error, evidence_of(quantized)


def _checkpoint_of(config: EngineConfig, path: Path, kernels: Kernels) -> Checkpoint:
    if config.needs_weights:
        return open_checkpoint(path)
    return DummyCheckpoint(path, seed=config.seed or 0, device=kernels.hardware.device)


def kernels_of(config: EngineConfig) -> Kernels:
    """The kernels that a configuration asks for on this machine."""
    hardware = detect(config.device)
    dtype = config.dtype if config.dtype != "auto" else default_dtype(hardware.device.type)[0]
    return Kernels(
        hardware,
        getattr(torch, dtype),
        linear_backend=config.fp8_gemm_backend,
        attention_backend=config.attention_backend,
        moe_backend=config.moe_runner_backend,
    )


def policy_of(config: EngineConfig) -> Policy:
    """What a configuration says of quantizing."""
    return Policy(config.quantization, config.quantization_ignored_layers, config.quantize_lm_head, config.requantize)


def found_rule(tensors: Iterable[TensorInspection]) -> FoundRule | None:
    """The scale rule that the blocks of tensors in MXFP8 show; None where there are no such tensors."""
    found = [tensor.evidence for tensor in tensors if tensor.evidence is not None]
    return sum(found, start=Evidence()).rule if found else None


def worst_tensors(tensors: Iterable[TensorInspection], count: int) -> list[TensorInspection]:
    """The quantized tensors with the least SQNR, the worst first."""
    measured = [tensor for tensor in tensors if tensor.sqnr_db is not None]
    return sorted(measured, key=lambda tensor: tensor.sqnr_db or 0.0)[:count]


def by_layer(tensors: Iterable[TensorInspection]) -> list[LayerInspection]:
    """What quantizing does to each layer, the worst first; without layers that have nothing quantized."""
    layers: dict[str, list[TensorInspection]] = {}
    for tensor in tensors:
        if tensor.sqnr_db is not None:
            match = _LAYER.match(tensor.name)
            layers.setdefault(match.group() if match else tensor.name.rpartition(".")[0], []).append(tensor)
    found = [
        LayerInspection(
            layer=layer,
            sqnr_db_min=min(item.sqnr_db or 0.0 for item in items),
            sqnr_db_mean=sum(item.sqnr_db or 0.0 for item in items) / len(items),
            fold_error_max=max(item.fold_error or 0.0 for item in items),
            worst=worst_tensors(items, 1)[0].name,
        )
        for layer, items in layers.items()
    ]
    return sorted(found, key=lambda item: item.sqnr_db_min)


def bound_backends(model: Module) -> tuple[BackendUse, ...]:
    """Which backends a loaded model uses."""
    return _count(item for module in model.modules() for item in module.chosen)


def _count(used: Iterable[Chosen]) -> tuple[BackendUse, ...]:
    counts = Counter((item.operation, item.choice.backend.name, item.choice.declined) for item in used)
    return tuple(BackendUse(*use, count) for use, count in counts.items())
