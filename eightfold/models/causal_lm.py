"""What the engine asks of any model: hidden states from tokens, logits from hidden states, and what to keep between steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from eightfold.kernels.operations import BatchMetadata
from eightfold.layers.caches import CacheLayout, LayerCache
from eightfold.layers.embedding import OutputHead
from eightfold.layers.module import Module


class Arch(Protocol):
    """What every architecture says of itself, normalised from a Hugging Face configuration.

    Attributes:
        model_type: the family, by its name in transformers.
        vocab_size: token ids lie below it.
        context_length: the longest sequence that the checkpoint is made for.
        dtype: dtype of the weights in the files, by torch's name, or None where the configuration does not say.
        layout: what its layers keep between steps.
        state_dtype: dtype that the checkpoint wants for recurrent states, by torch's name; None where it has none or says none.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def model_type(self) -> str:
        """The family."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie below it."""

    @property
    def context_length(self) -> int:
        """Tokens."""

    @property
    def dtype(self) -> str | None:
        """Of the weights in the files."""

    @property
    def layout(self) -> CacheLayout:
        """What layers keep."""

    @property
    def state_dtype(self) -> str | None:
        """Of recurrent states."""


class CausalLM(Module, ABC):
    """A model that generates text. Fill its weights, then `bind()`, then call it.

    It runs on explicit arguments alone: no engine, no context, no process group.

    Attributes:
        arch: what it is.
        lm_head: logits from final hidden states.
    """

    arch: Arch
    lm_head: OutputHead

    @abstractmethod
    def __call__(self, token_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], metadata: BatchMetadata) -> Tensor:
        """Final hidden states `[T, hidden]`.

        Args:
            token_ids: `int64 [T]`, the chunks of all sequences one after another.
            positions: `int64 [T]`, the position of each token in its sequence.
            caches: what each layer keeps, by `arch.layout`; this batch's tokens are taken into it.
            metadata: where the sequences lie in the batch and in the caches.
        """

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, vocab_size]` from final hidden states `[T, hidden]`."""
        return self.lm_head(hidden_states)
