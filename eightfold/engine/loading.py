"""A model from its files, ready to run; and other weights for it while it is in service."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal

import torch

from eightfold.config import (
    EngineConfig,
    HardwareFacts,
    ModelFacts,
    ResolvedConfig,
    default_dtype,
    default_state_dtype,
    resolve,
)
from eightfold.errors import CheckpointError, InputError
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.layers.caches import CacheLayout
from eightfold.models.causal_lm import Arch, CausalLM
from eightfold.models.checkpoint import Checkpoint, GenerationConfig, read_generation_config
from eightfold.models.dummy import DummyCheckpoint, load_dummy
from eightfold.models.loader import LoadPlan, LoadReport, check_effect, load, open_checkpoint, plan, read_model
from eightfold.quant.mxfp8 import ScaleRule
from eightfold.quant.policy import Policy
from eightfold.types import Progress

# What may differ between a model in service and a checkpoint that replaces its weights.
_MAY_DIFFER = ("dtype", "state_dtype")


class LoadedModel:
    """A bound model, and what it came from.

    Attributes:
        model: the model.
        kernels: what it runs on.
        config: everything that was decided.
        path: the checkpoint's folder.
        generation: the checkpoint's end tokens and sampling values.
        report: what became of each tensor.
    """

    def __init__(self, config: EngineConfig, *, report: Progress | None = None) -> None:
        """Find the checkpoint, decide the configuration, load and quantize.

        Raises:
            InputError: a value, a checkpoint or a backend that cannot be used; all but damaged weights are found before any
                weight is read.
        """
        self.path = resolve_model(config.model, revision=config.revision, report=report, needs_weights=config.needs_weights)
        self.model: CausalLM = read_model(self.path)
        arch, layout = self.model.arch, self.model.arch.layout
        self.generation: GenerationConfig = read_generation_config(self.path)
        hardware = detect(config.device)
        device: Literal["cpu", "cuda"] = "cuda" if hardware.device.type == "cuda" else "cpu"
        dtype = config.dtype if config.dtype != "auto" else default_dtype(device)[0]
        state_dtype = config.mamba_ssm_dtype if config.mamba_ssm_dtype != "auto" else default_state_dtype(arch.state_dtype)[0]
        self.kernels = Kernels(
            hardware,
            getattr(torch, dtype),
            linear_backend=config.fp8_gemm_backend,
            attention_backend=config.attention_backend,
            moe_backend=config.moe_runner_backend,
            state_dtype=getattr(torch, state_dtype),
        )
        self._policy = Policy(
            config.quantization, config.quantization_ignored_layers, config.quantize_lm_head, config.requantize
        )
        self._rule = ScaleRule(config.scale_rule)
        # None: the weights come from files, as they do after an update of dummy ones.
        self._dummy_seed = None if config.needs_weights else config.seed or 0
        checkpoint = self._open()
        load_plan = plan(self.model, checkpoint, self._policy, self.kernels)
        check_effect(load_plan, self.kernels, self._rule)
        facts = ModelFacts(
            arch.context_length,
            load_plan.weight_bytes,
            _kv_bytes_per_token(layout),
            _state_bytes(layout),
            arch.state_dtype,
            _stored_as(checkpoint),
        )
        self.config: ResolvedConfig = resolve(config, facts, HardwareFacts(device, hardware.name, hardware.memory_bytes))
        self.report: LoadReport = self._load(checkpoint, load_plan, report)

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""
        return self.model.arch.vocab_size

    def update(self, model: str, *, revision: str | None = None, report: Progress | None = None) -> None:
        """Put the weights of another checkpoint of the same shapes in the place of these, which may be dummy ones.

        Everything that can be known from configuration and headers is checked before the first weight is touched. Where a file
        turns out to be damaged after that, the weights that ran before are loaded again.

        Raises:
            InputError: a checkpoint that cannot be used or whose shapes differ; the model runs on as before.
            RuntimeError: loading failed, and so did loading the former weights: the model can no longer be used.
        """
        path = resolve_model(model, revision=revision, report=report)
        _check_same_shapes(self.model.arch, read_model(path).arch, path)
        generation = read_generation_config(path)
        checkpoint = open_checkpoint(path)
        load_plan = plan(self.model, checkpoint, self._policy, self.kernels)
        check_effect(load_plan, self.kernels, self._rule)
        try:
            self.report = self._load(checkpoint, load_plan, report)
        except InputError:
            self._restore()
            raise
        self.path, self.generation, self._dummy_seed = path, generation, None

    def _restore(self) -> None:
        """Load the weights that ran before."""
        try:
            checkpoint = self._open()
            self.report = self._load(checkpoint, plan(self.model, checkpoint, self._policy, self.kernels))
        except InputError as error:
            raise RuntimeError(f"the weights in {self.path} cannot be loaded again, and the model has none: {error}") from error

    def _open(self) -> Checkpoint:
        """The weights in `path`, or those that the configuration there is given."""
        if self._dummy_seed is None:
            return open_checkpoint(self.path)
        return DummyCheckpoint(self.path, seed=self._dummy_seed, device=self.kernels.hardware.device)

    def _load(self, checkpoint: Checkpoint, load_plan: LoadPlan, report: Progress | None = None) -> LoadReport:
        if isinstance(checkpoint, DummyCheckpoint):
            return load_dummy(self.model, checkpoint, load_plan, self.kernels, rule=self._rule, report=report)
        return load(self.model, checkpoint, load_plan, self.kernels, rule=self._rule, report=report)


def check_configuration(path: Path) -> None:
    """Raise CheckpointError where the configuration of a checkpoint folder cannot be served; no weight is read."""
    read_model(path)


def _check_same_shapes(served: Arch, found: Arch, path: Path) -> None:
    """Raise CheckpointError for the first thing in which another architecture differs."""
    if type(served) is not type(found):
        raise CheckpointError(str(path), got=f"a model of type {found.model_type}", expected=served.model_type)
    for item in fields(served):
        ours, theirs = getattr(served, item.name), getattr(found, item.name)
        if ours != theirs and item.name not in _MAY_DIFFER:
            raise CheckpointError(
                f"{item.name} of {path}",
                got=str(theirs),
                expected=f"{ours}, as the model has that is loaded",
                remedy="Other shapes need a start of their own.",
            )


def _stored_as(checkpoint: Checkpoint) -> str:
    form = checkpoint.serialized
    return "" if form is None else f"{' and '.join(form.algorithms)} by {form.source}"


def _kv_bytes_per_token(layout: CacheLayout) -> dict[str, int]:
    """Bytes of keys and values that a token occupies over all layers, by the dtype of the cache."""
    return {name: layout.kv_bytes_per_token(getattr(torch, name)) for name in ("float32", "bfloat16", "float16")}


def _state_bytes(layout: CacheLayout) -> dict[tuple[str, str], int]:
    """Bytes of the recurrent states of a sequence over all layers, by the dtypes of activations and of states."""
    return {
        (dtype, state_dtype): layout.state_bytes(getattr(torch, dtype), getattr(torch, state_dtype))
        for dtype in ("float32", "bfloat16", "float16")
        for state_dtype in ("float32", "bfloat16")
    }
