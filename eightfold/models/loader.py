"""From files to a model: each tensor is checked by its header, read once, and quantized or copied as it arrives.

A fused weight has storage of its own from the arrival of its first part, and parts are quantized straight into their rows, so
the peak is the final model plus, while a backend repacks a weight into its own layout, that one weight. The steps are

    plan     match names and shapes, decide what is quantized, and ask for a backend: all errors before any weight is read
    read     fill the weights
    bind     give the whole weights to the backends, which are chosen again by what the weights have become
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from eightfold.errors import CheckpointError, InputError
from eightfold.kernels.selection import Kernels
from eightfold.kernels.storage import Arena
from eightfold.layers.linear import dtype_name
from eightfold.layers.module import Chosen, Module
from eightfold.layers.weight import Part, Weight
from eightfold.models.causal_lm import CausalLM
from eightfold.models.checkpoint import DTYPES, Checkpoint, read_json, serialized_form
from eightfold.models.matching import account_for_rest, check_agreement, match_part, tied_names
from eightfold.models.registry import family_of
from eightfold.models.stored import Stored, describe, kv_cache_scales, read_stored
from eightfold.quant.checkpoints import INPUT_SCALES, KV_SCALE, SCALE_SUFFIXES
from eightfold.quant.fp8 import WeightTensor, widen
from eightfold.quant.mxfp8 import ScaleRule, num_blocks
from eightfold.quant.policy import Decision, Policy, Role
from eightfold.types import Progress


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a tensor of the checkpoint goes, and what happens to it on the way."""

    weight: Weight
    part: Part
    decision: Decision
    dtype: torch.dtype
    stored: Stored
    requantized: bool = False

    @property
    def format(self) -> str:
        """ "mxfp8", "fp8", or the name of a dtype: what it will be in memory."""
        if not self.decision.quantized:
            return dtype_name(self.dtype)
        return "mxfp8" if self.requantized else self.stored.format or "mxfp8"

    @property
    def nbytes(self) -> int:
        """Bytes that it will occupy."""
        *rows, k = self.part.shape
        num_rows = torch.Size(rows).numel()
        match self.format:
            case "mxfp8":
                return num_rows * (k + num_blocks(k))
            case "fp8":
                return num_rows * (k + 4 * -(-k // min(self.stored.group_size, k)))
        return num_rows * k * self.dtype.itemsize

    def arriving(self, checkpoint: Checkpoint, tensor: Tensor) -> WeightTensor:
        """What the weight is given for a tensor of the checkpoint."""
        value = read_stored(checkpoint, self.stored, tensor)
        if self.stored.scheme is not None and (self.requantized or not self.decision.quantized):
            return widen(value)
        return value


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What will be read and what will become of it.

    Attributes:
        destinations: for each tensor of the checkpoint where it goes: one place, or two for a tied head that is quantized.
        skipped: tensors of the checkpoint that are not needed, by their names in the files, each with the reason.
        tied: names that share the weight of another, by config.json, and the name of that other.
        chosen: the backends that will be asked for, as far as can be known before weights are read.
        notes: what is worth a line: tensors that are passed over or cut.
    """

    destinations: Mapping[str, tuple[Destination, ...]]
    skipped: Mapping[str, str]
    tied: Mapping[str, str]
    chosen: tuple[Chosen, ...]
    notes: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model as it will lie in memory."""
        return sum(place.nbytes for places in self.destinations.values() for place in places)


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What became of one tensor of the checkpoint."""

    name: str
    role: Role
    shape: tuple[int, ...]
    decision: Decision
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading did.

    Attributes:
        tensors: every tensor that went into the model, in the order of the files.
        skipped: tensors that were not needed, each with the reason.
        notes: what is worth a line: tensors that were passed over or cut.
        seconds: time to read, quantize and bind.
        kv_cache_scales: scales of keys and values that the checkpoint brings, by their names.
    """

    tensors: tuple[TensorReport, ...]
    skipped: Mapping[str, str]
    notes: tuple[str, ...]
    seconds: float
    kv_cache_scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes_before(self) -> int:
        """Bytes in the files."""
        return sum(item.bytes_before for item in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Bytes in memory."""
        return sum(item.bytes_after for item in self.tensors)


def read_model(path: Path) -> CausalLM:
    """The model of a checkpoint folder, without weights.

    Raises:
        CheckpointError: the configuration is missing, damaged or not supported.
    """
    config = read_json(path / "config.json")
    serialized_form(path)  # refused here as well, where no weight is looked at
    return family_of(config).build(config)


def open_checkpoint(path: Path) -> Checkpoint:
    """The files of a checkpoint folder, whose tensors have the names that its model uses.

    Raises:
        CheckpointError: files that are missing, damaged or disagree.
    """
    family = family_of(read_json(path / "config.json"))
    return Checkpoint(path, canonical=family.canonical, unused=family.unused, serialized=serialized_form(path))


def read_tensors(path: str | Path) -> Iterator[tuple[str, WeightTensor]]:
    """Every weight of a checkpoint folder, in whichever dialect it is, one at a time and in the order of the files.

    Scales do not come by themselves: a weight that is quantized comes with them, as an `MXTensor` or an `FP8Tensor`, any other
    as a tensor of its own dtype. `eightfold.quant.fp8.widen` makes values of each. Names are those that the model uses, so that
    two spellings of one checkpoint have the same ones. What comes is a view of the mapped files: copy from it, do not keep it.

    Raises:
        CheckpointError: files that are missing, damaged or disagree with the configuration, by tensor.
    """
    checkpoint = open_checkpoint(Path(path))
    stored = {
        name: describe(checkpoint, info, quantizable=False)
        for name, info in checkpoint.tensors.items()
        if not name.endswith((*SCALE_SUFFIXES, *INPUT_SCALES)) and not KV_SCALE.search(name)
    }
    for info, tensor in checkpoint.read():
        if info.name in stored:
            yield info.name, read_stored(checkpoint, stored[info.name], tensor)


def plan(model: CausalLM, checkpoint: Checkpoint, policy: Policy, kernels: Kernels) -> LoadPlan:
    """Match a model and a checkpoint, and decide on every tensor, without reading any.

    Raises:
        CheckpointError: tensors are missing, unexpected, or of a wrong shape or dtype.
        InputError: the policy cannot be followed, or a named backend cannot run a layer.
    """
    places: dict[str, list[Destination]] = {}
    formats: dict[int, str] = {}
    quantizable: list[str] = []
    notes: Counter[str] = Counter()
    for weight in model.weights():
        weight.choose_spelling(checkpoint.tensors.__contains__)
        parts = [match_part(checkpoint, weight, part) for part in weight.parts]
        infos = [stored.info for stored in parts]
        check_agreement(weight, parts)
        layers = [info.stored_name.rpartition(".")[0] for info in infos]
        if checkpoint.serialized is None:
            decision = policy.decide(weight.role, layers)
        else:
            decision = policy.decide_stored(weight.role, layers, parts[0].format, parts[0].excluded)
        quantizable += layers if weight.role.quantizable else []
        for part, stored, info in zip(weight.parts, parts, infos, strict=True):
            requantized = decision.quantized and policy.quantization == "mxfp8" and stored.format == "fp8"
            dtype = _kept_dtype(weight.role, DTYPES.get(info.dtype, torch.float32), kernels.activation_dtype)
            place = Destination(weight, part, decision, dtype, stored, requantized)
            formats.setdefault(id(weight), place.format)
            claims = places.setdefault(part.name, [])
            if claims and not decision.quantized:
                continue  # a tied head that stays as it is shares the storage of the embedding
            claims.append(place)
            if info.shape != part.shape:
                notes[f"{weight.name}: {weight.cut(part, info.shape)}"] += 1
    tied = tied_names(model)
    scales = [scale.name for claims in places.values() for place in claims for scale in place.stored.scales]
    skipped = account_for_rest(checkpoint, {*places, *scales}, tied)
    policy.check_ignored(quantizable)
    chosen = [item for module in model.modules() for item in module.choose(kernels, lambda weight: formats[id(weight)])]
    passed_over = Counter(reason for reason in skipped.values() if not reason.startswith("tied"))
    return LoadPlan(
        MappingProxyType({name: tuple(claims) for name, claims in places.items()}),
        MappingProxyType(skipped),
        tied,
        tuple(chosen),
        (*notes, *(_passed_over(count, reason) for reason, count in passed_over.items())),
    )


def check_effect(load_plan: LoadPlan, kernels: Kernels, rule: ScaleRule) -> None:
    """Refuse what was asked for in vain: a backend for weights that are not there, or a rule where nothing is rounded.

    Raises:
        InputError: the option.
    """
    named = (
        ("fp8_gemm_backend", kernels.linear_backend, "linear layers"),
        ("moe_runner_backend", kernels.moe_backend, "experts"),
    )
    for option, name, operation in named:
        used = [item for item in load_plan.chosen if item.operation.startswith(f"{operation.split()[0]} ")]
        if name != "auto" and not any(item.choice.requested == name for item in used):
            what = f"a model without {operation}" if not used else "weights that are not quantized"
            raise InputError(option, got=f"{name} for {what}", expected="auto")
    places = [place for claims in load_plan.destinations.values() for place in claims]
    if rule is ScaleRule.CEIL or any(place.decision.quantized and place.stored.format != "mxfp8" for place in places):
        return
    stored = any(place.stored.format == "mxfp8" for place in places)
    what = "weights that are in MXFP8 already, whose bits are kept" if stored else "weights of which none is quantized"
    raise InputError("scale_rule", got=f"{rule.value} for {what}", expected="no rule, or weights that become MXFP8 here")


def _passed_over(count: int, reason: str) -> str:
    return f"{count} {'tensor is' if count == 1 else 'tensors are'} not used: {reason}"


def load(
    model: Module,
    checkpoint: Checkpoint,
    load_plan: LoadPlan,
    kernels: Kernels,
    *,
    rule: ScaleRule = ScaleRule.CEIL,
    report: Progress | None = None,
) -> LoadReport:
    """Read the checkpoint into the model and bind it.

    A model that runs already is loaded again: into the memory that its backends compute with, where they take weights as they
    come, and with every choice made anew.

    Raises:
        CheckpointError: a tensor holds NaN or infinity, or a file changed or ended since it was opened.
    """
    start = time.perf_counter()
    model.release()
    tensors = read(checkpoint, load_plan, kernels, rule=rule, report=report)
    model.bind(kernels)
    return LoadReport(tensors, load_plan.skipped, load_plan.notes, time.perf_counter() - start, kv_cache_scales(checkpoint))


def read(
    checkpoint: Checkpoint,
    load_plan: LoadPlan,
    kernels: Kernels,
    *,
    rule: ScaleRule = ScaleRule.CEIL,
    report: Progress | None = None,
) -> tuple[TensorReport, ...]:
    """Fill the weights that the plan was made for; `load()` without binding. Raises as `load()` does."""
    for places in load_plan.destinations.values():
        for place in places:
            place.weight.begin()
    arena = Arena(kernels.hardware.device)
    tensors: list[TensorReport] = []
    done, total = 0, checkpoint.nbytes
    for info, tensor in checkpoint.read():
        if info.name in load_plan.tied and not torch.equal(tensor, checkpoint.read_one(load_plan.tied[info.name])):
            raise CheckpointError(
                f"tensor {info.stored_name}",
                got=f"values that differ from {load_plan.tied[info.name]}",
                expected="the same ones, since config.json ties the two",
                remedy='If they should differ, set "tie_word_embeddings": false in config.json.',
            )
        for place in load_plan.destinations.get(info.name, ()):
            try:
                value = place.arriving(checkpoint, tensor)
                place.weight.load(place.part, value, decision=place.decision, rule=rule, dtype=place.dtype, arena=arena)
            except ValueError as error:
                raise CheckpointError(f"tensor {info.stored_name}", got=str(error), expected="finite values") from error
            before = place.stored.nbytes if place is load_plan.destinations[info.name][0] else 0
            tensors.append(TensorReport(info.stored_name, place.weight.role, info.shape, place.decision, before, place.nbytes))
        done += info.nbytes
        if report is not None:
            report("load", done, total)
    return tuple(tensors)


def _kept_dtype(role: Role, stored: torch.dtype, activations: torch.dtype) -> torch.dtype:
    """The dtype of a tensor that is not quantized: as it is stored, or the activations' where that is narrower and will do."""
    return stored if activations is torch.float32 or role.keeps_precision else activations
