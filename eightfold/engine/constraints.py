"""Masks from grammars, computed in threads while the model runs.

A sequence's mask depends on its tokens alone, and they are known when a step begins. So the work starts before the model does
and is awaited when the logits are there. The library behind a constraint lets Python go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from eightfold.types import Batch, Constraint, Sequence

Masks: TypeAlias = Mapping[Sequence, "Future[bytes | None]"]
"""The mask of each sequence of a batch that has a constraint and samples, sooner or later."""

_THREADS = 4


class MaskWorkers:
    """Threads that compute masks. They start with the first mask."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar mask")

    def start(self, batch: Batch) -> Masks:
        """Begin with the masks that a batch will need."""
        return {
            chunk.sequence: self._pool.submit(_mask, chunk.sequence.constraint, _answer(chunk.sequence))
            for chunk in batch.chunks
            if chunk.samples and chunk.sequence.constraint is not None
        }


def allowed(mask: bytes, vocab_size: int) -> Tensor:
    """A mask as a tensor of truth values, `[vocab_size]`, on the CPU. Ids beyond the mask are not allowed."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=vocab_size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def _mask(constraint: Constraint, token_ids: list[int]) -> bytes | None:
    return constraint.mask(token_ids)


def _answer(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :]
