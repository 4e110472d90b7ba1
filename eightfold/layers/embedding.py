"""Token embeddings, and the output head, which may share their weight."""

from __future__ import annotations

import torch
from torch import Tensor

from eightfold.kernels.selection import Kernels
from eightfold.layers.linear import Linear
from eightfold.layers.module import Module
from eightfold.layers.weight import Weight
from eightfold.quant.policy import Role


class Embedding(Module):
    """A table `[vocab_size, hidden]` that token ids select rows of."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int) -> None:
        self.source = Weight(f"{name}.weight", Role.EMBEDDING, {f"{name}.weight": vocab_size}, hidden_size)
        self.table: Tensor
        self._dtype: torch.dtype

    def bind(self, kernels: Kernels) -> None:
        """Take the table."""
        self.table = self.source.take_dense()
        self._dtype = kernels.activation_dtype

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Hidden states `[T, hidden]` in the activation dtype from ids `int64 [T]`."""
        return torch.nn.functional.embedding(token_ids, self.table).to(self._dtype)


class OutputHead(Module):
    """Logits from hidden states, by a weight of its own or by the embedding's.

    A tied head shares the embedding's storage. Where the policy quantizes the head it gets a copy of its own, in MXFP8, and
    the embedding stays as it is: the head is read whole for every token, the embedding one row at a time.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, *, tied_to: Embedding | None) -> None:
        self.embedding = tied_to
        part = name if tied_to is None else tied_to.source.layers[0]
        self.linear = Linear(name, hidden_size, {part: vocab_size}, role=Role.HEAD)

    def bind(self, kernels: Kernels) -> None:
        """Take the weight; a tied and unquantized head takes the embedding's, which is bound before it."""
        if self.embedding is not None and not self.linear.weight.decision.quantized:
            self.linear.bind_to(kernels, self.embedding.table, None)
        else:
            self.linear.bind(kernels)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, vocab_size]`."""
        return self.linear(hidden_states)
