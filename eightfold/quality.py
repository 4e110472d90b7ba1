"""What `eightfold eval` measures: a quantized model beside the one it was made from, as a whole and tensor by tensor.

The noise of a tensor is that of its weights alone. What it does to the model is another matter, which perplexity and KL say of
the whole, and `eightfold.budget` of each layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from eightfold.comparison import StoredTensors, difference
from eightfold.config import EngineConfig
from eightfold.errors import InputError
from eightfold.evaluate import LogitsFn, checkpoint_logits
from eightfold.hub.resolve import resolve_model
from eightfold.inspection import Inspection, kernels_of, policy_of
from eightfold.models.loader import open_checkpoint, read_model
from eightfold.quant.evidence import Evidence, evidence_of
from eightfold.quant.mxfp8 import MXTensor, ScaleRule
from eightfold.quant.policy import Policy
from eightfold.types import Progress

BF16 = "bf16"
"""The word for the weights of a checkpoint as they were before they were quantized."""
_LAYER = re.compile(r"(?P<layer>.*?\blayers\.(?P<index>\d+))\.(?P<rest>.*)")
_EXPERT = re.compile(r"(?<=\bexperts)\.\d+(?=\.)|\[\d+\]$")


@dataclass(frozen=True, slots=True)
class TensorNoise:
    """What quantizing did to one tensor, or to one expert in a tensor of all.

    Attributes:
        name: its name.
        layer: the layer of the model that it is in, such as "model.layers.3".
        index: that layer's number; None where it has none.
        kind: what it is within its layer, such as "self_attn.q_proj", the same for all experts.
        sqnr_db: signal to quantization noise in dB, infinite where nothing was lost.
        evidence: what its blocks say; None where it is not in MXFP8.
    """

    name: str
    layer: str
    index: int | None
    kind: str
    sqnr_db: float
    evidence: Evidence | None


@dataclass(frozen=True, slots=True)
class LayerNoise:
    """The noise of one layer.

    Attributes:
        layer: its name.
        sqnr_db_min: of its worst tensor.
        sqnr_db_mean: over its tensors.
        worst: the name of the tensor with the least SQNR.
    """

    layer: str
    sqnr_db_min: float
    sqnr_db_mean: float
    worst: str


class Pair:
    """A model and what it is measured against.

    Args:
        config: the model, and how it is loaded.
        against: "bf16" for its own weights as they are in the files, or another checkpoint.
        report: told about downloads and conversion.

    Attributes:
        path: folder of the model.
        reference: folder of the other one, which may be the same.
        policy: what is quantized of the model.
        rule: how.
        kernels: what both run on.
        context_length: tokens of the longest window that both take.

    Raises:
        InputError: the checkpoint is quantized in its files and `against` does not say what it was made from, or the two have
            different vocabularies.
    """

    def __init__(self, config: EngineConfig, against: str = BF16, *, report: Progress | None = None) -> None:
        self._config = config
        self.path = resolve_model(config.model, revision=config.revision, report=report)
        self.reference: Path = self.path if against == BF16 else resolve_model(against, report=report)
        self.policy, self.rule, self.kernels = policy_of(config), ScaleRule(config.scale_rule), kernels_of(config)
        self.is_serialized = open_checkpoint(self.path).serialized is not None
        if open_checkpoint(self.reference).serialized is not None:
            raise InputError(
                "--against",
                got=f"{config.model if against == BF16 else against}, which is quantized in its files",
                expected="the checkpoint that the model was made from",
            )
        archs = [read_model(path).arch for path in (self.path, self.reference)]
        if archs[0].vocab_size != archs[1].vocab_size:
            raise InputError(
                "--against",
                got=f"{against}, with {archs[1].vocab_size} tokens",
                expected=f"{archs[0].vocab_size}, as the model",
            )
        self.context_length = min(arch.context_length for arch in archs)

    def model_logits(self) -> LogitsFn:
        """The model."""
        return checkpoint_logits(self.path, self.kernels, policy=self.policy, rule=self.rule)

    def reference_logits(self) -> LogitsFn:
        """What it is measured against."""
        return checkpoint_logits(self.reference, self.kernels, policy=Policy(None))

    def noise(self) -> Iterator[TensorNoise]:
        """Each quantized tensor, one at a time: what rounding did to it, or where files hold it rounded, what they did.

        Raises:
            CheckpointError: a tensor that cannot be read.
            InputError: the reference lacks a tensor, or has it in another shape.
        """
        yield from self._stored_noise() if self.is_serialized else self._online_noise()

    def _online_noise(self) -> Iterator[TensorNoise]:
        for tensor in Inspection(self._config).tensors():
            if tensor.sqnr_db is not None:
                yield tensor_noise(tensor.name, tensor.sqnr_db, tensor.evidence)

    def _stored_noise(self) -> Iterator[TensorNoise]:
        model, reference = StoredTensors(self.path), StoredTensors(self.reference)
        for name, shape in model.shapes.items():
            if model.form(name) not in ("mxfp8", "fp8"):
                continue
            if reference.shapes.get(name) != shape:
                there = f"shape {list(reference.shapes[name])}" if name in reference.shapes else "no such tensor"
                raise InputError(f"--against: tensor {name}", got=there, expected=f"shape {list(shape)}, as in the model")
            value = model[name]
            sqnr, _ = difference(reference[name], value)
            yield tensor_noise(name, sqnr, evidence_of(value) if isinstance(value, MXTensor) else None)


def tensor_noise(name: str, sqnr_db: float, evidence: Evidence | None) -> TensorNoise:
    """A measured tensor with its place in the model, which its name says."""
    match = _LAYER.fullmatch(name)
    if match is None:
        layer = name.removesuffix(".weight")
        return TensorNoise(name, layer, None, layer, sqnr_db, evidence)
    kind = _EXPERT.sub("", match["rest"].removesuffix(".weight"))
    return TensorNoise(name, match["layer"], int(match["index"]), kind, sqnr_db, evidence)


def by_layer(tensors: Iterable[TensorNoise]) -> list[LayerNoise]:
    """The noise of each layer, the worst first."""
    layers: dict[str, list[TensorNoise]] = {}
    for tensor in tensors:
        layers.setdefault(tensor.layer, []).append(tensor)
    found = []
    for layer, items in layers.items():
        worst = min(items, key=lambda item: item.sqnr_db)
        found.append(LayerNoise(layer, worst.sqnr_db, sum(item.sqnr_db for item in items) / len(items), worst.name))
    return sorted(found, key=lambda item: item.sqnr_db_min)


def by_kind(tensors: Iterable[TensorNoise]) -> Mapping[str, Mapping[int, tuple[float, float]]]:
    """Kind to number of layer to the least and the mean SQNR of its tensors there; those that are finite and in a layer."""
    found: dict[str, dict[int, list[float]]] = {}
    for tensor in tensors:
        if tensor.index is not None and math.isfinite(tensor.sqnr_db):
            found.setdefault(tensor.kind, {}).setdefault(tensor.index, []).append(tensor.sqnr_db)
    return {
        kind: {index: (min(values), sum(values) / len(values)) for index, values in sorted(layers.items())}
        for kind, layers in found.items()
    }


def exponents_of(tensors: Iterable[TensorNoise], layer: str) -> Mapping[str, Mapping[int, float]]:
    """Kind to scale exponent to the share of blocks that have it, over the tensors of one layer."""
    found: dict[str, Evidence] = {}
    for tensor in tensors:
        if tensor.layer == layer and tensor.evidence is not None:
            found[tensor.kind] = found.get(tensor.kind, Evidence()) + tensor.evidence
    return {
        kind: {exponent: count / sum(item.exponents.values()) for exponent, count in sorted(item.exponents.items())}
        for kind, item in found.items()
        if item.exponents
    }
