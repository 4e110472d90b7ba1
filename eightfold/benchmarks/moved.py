"""How many bytes a step has to move, so that its time can be set beside what the memory can do.

    weights   every weight once, as it lies in memory by its format; of an embedding the rows of the step's tokens, unless the
              output head shares it; of a mixture the experts that the step's tokens chose
    cache     keys and values: each sequence's context read, and the new tokens written; recurrent states read and written

What stays in caches of the chip (activations, a block of keys that several queries share) is not counted. Two counts are too
high: a window of attention shortens what is read, and a step that ends no prompt does not read the output head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from eightfold.engine.loading import LoadedModel
from eightfold.engine.metrics import Step
from eightfold.layers.module import Module
from eightfold.layers.moe import MoE
from eightfold.models.causal_lm import CausalLM
from eightfold.quant.policy import Role


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one step, or of several together."""

    weights: float = 0.0
    cache: float = 0.0

    @property
    def total(self) -> float:
        """Of both."""
        return self.weights + self.cache

    def __add__(self, other: Moved) -> Moved:
        """Bytes of both."""
        return Moved(self.weights + other.weights, self.cache + other.cache)


@dataclass(frozen=True, slots=True)
class Mixtures:
    """The mixtures of a model.

    Attributes:
        num_experts: of each of its layers.
        top_k: experts of a token, of each layer.
        nbytes: of one expert, on average.
    """

    num_experts: tuple[int, ...] = ()
    top_k: tuple[int, ...] = ()
    nbytes: float = 0.0

    def expected(self, num_tokens: int) -> tuple[float, ...]:
        """Experts that tokens touch in each layer where all are equally likely: E (1 - (1 - k / E)^T)."""
        return tuple(e * (1 - (1 - k / e) ** num_tokens) for e, k in zip(self.num_experts, self.top_k, strict=True))


class Bytes:
    """The bytes of one loaded model.

    Args:
        loaded: the model, with the report of loading it.

    Attributes:
        dense: of the weights that every step reads.
        row: of a token's embedding; 0 where the whole table is read as the output head.
        mixtures: the experts.
        kv: of a token's keys and values.
        state: of a sequence's recurrent states.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        tensors, layout, kernels = loaded.report.tensors, loaded.model.arch.layout, loaded.kernels
        has_head = any(item.role is Role.HEAD for item in tensors)
        tables = [item for item in tensors if item.role is Role.EMBEDDING and has_head]
        experts = [item for item in tensors if item.role is Role.EXPERTS]
        self.row = sum(item.bytes_after / item.shape[0] for item in tables)
        self.dense = sum(item.bytes_after for item in tensors) - sum(item.bytes_after for item in (*tables, *experts))
        layers = [module.experts for module in loaded.model.modules() if isinstance(module, MoE)]
        counts = tuple(layer.w2.shape[0] for layer in layers)
        nbytes = sum(item.bytes_after for item in experts) / sum(counts) if counts else 0.0
        self.mixtures = Mixtures(counts, tuple(layer.top_k for layer in layers), nbytes)
        self.kv = layout.kv_bytes_per_token(kernels.activation_dtype)
        self.state = layout.state_bytes(kernels.activation_dtype, kernels.state_dtype)

    def of(self, step: Step, touched: Sequence[float] | None = None) -> Moved:
        """Bytes of a step.

        Args:
            step: what it computed.
            touched: experts that its tokens chose, by layer; None takes what an even choice would touch.
        """
        chosen = sum(self.mixtures.expected(step.num_tokens) if touched is None else touched)
        weights = self.dense + step.num_tokens * self.row + chosen * self.mixtures.nbytes
        cache = (step.context_tokens + step.num_tokens) * self.kv + 2 * step.num_sequences * self.state
        return Moved(weights, cache)


@dataclass(slots=True)
class Choices:
    """Experts that were chosen while somebody looked.

    Attributes:
        touched: different experts of the last step, by layer; None where no router was seen to choose.
    """

    by_layer: dict[int, int] = field(default_factory=dict)

    @property
    def touched(self) -> tuple[int, ...] | None:
        """By layer, in their order."""
        return tuple(self.by_layer[layer] for layer in sorted(self.by_layer)) or None


@contextmanager
def watched_routers(model: CausalLM) -> Iterator[Choices]:
    """Count the experts that every mixture of a model chooses inside the `with`. It slows steps, so none is timed there."""
    choices = Choices()
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    gates = [mixture.gate for mixture in mixtures]
    for layer, mixture in enumerate(mixtures):
        mixture.gate = _Watched(mixture.gate, choices, layer)  # type: ignore[assignment]
    try:
        yield choices
    finally:
        for mixture, gate in zip(mixtures, gates, strict=True):
            mixture.gate = gate


class _Watched(Module):
    """A router that says what it chose."""

    def __init__(self, gate: MoE | Module, choices: Choices, layer: int) -> None:
        self._gate, self._choices, self._layer = gate, choices, layer

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        expert_ids, weights = self._gate(hidden_states)  # type: ignore[operator]
        self._choices.by_layer[self._layer] = len(expert_ids.unique())
        return expert_ids, weights
