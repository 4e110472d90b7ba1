"""How long steps take, by what they compute, and how long the device waits between two of them.

A step decodes, computes chunks of prompts, or both. Its time is that of the runner: from a batch of ids to tokens on the host.
The host's gap is the time from the end of one run to the beginning of the next, while some sequence waits for it:
postprocessing, the loop around the engine, and scheduling. The first step after a rest has no gap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from eightfold.types import Batch, Chunk

StepKind: TypeAlias = Literal["prefill", "decode", "mixed"]
KINDS: tuple[StepKind, ...] = get_args(StepKind)


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        kind: what it computed.
        num_sequences: chunks of its batch.
        num_tokens: tokens that it computed.
        context_tokens: tokens whose keys and values its sequences had in the end, over all of them.
        seconds: time of the run.
        gap_seconds: time before it that the device waited; 0 where nothing was under way.
    """

    kind: StepKind
    num_sequences: int
    num_tokens: int
    context_tokens: int
    seconds: float
    gap_seconds: float


@dataclass(slots=True)
class StepTotals:
    """Sums over the steps of one kind, since the start."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    gap_seconds: float = 0.0


class StepTimes:
    """Takes the times of steps.

    Attributes:
        last: the last step that ended; None before the first.
        totals: sums by kind.
    """

    def __init__(self) -> None:
        self.last: Step | None = None
        self.totals: Mapping[StepKind, StepTotals] = MappingProxyType({kind: StepTotals() for kind in KINDS})
        self._ended_at: float | None = None

    @contextmanager
    def measure(self, batch: Batch) -> Iterator[None]:
        """Time the run of a batch, which is the body of the `with`; one that raises does not count."""
        begin = time.perf_counter()
        ended_at, self._ended_at = self._ended_at, None
        is_awaited = ended_at is not None and any(map(_is_under_way, batch.chunks))
        gap = begin - ended_at if ended_at is not None and is_awaited else 0.0
        yield
        self._ended_at = time.perf_counter()
        step = Step(
            _kind(batch),
            len(batch.chunks),
            batch.num_tokens,
            sum(chunk.start + chunk.length for chunk in batch.chunks),
            self._ended_at - begin,
            gap,
        )
        totals = self.totals[step.kind]
        totals.steps += 1
        totals.tokens += step.num_tokens
        totals.seconds += step.seconds
        totals.gap_seconds += step.gap_seconds
        self.last = step

    def rest(self) -> None:
        """Count no gap before the next step: somebody stopped the engine with work under way."""
        self._ended_at = None


def _kind(batch: Batch) -> StepKind:
    num_decodes = sum(map(_decodes, batch.chunks))
    if num_decodes == 0:
        return "prefill"
    return "decode" if num_decodes == len(batch.chunks) else "mixed"


def _decodes(chunk: Chunk) -> bool:
    return chunk.length == 1 and chunk.start >= chunk.sequence.num_prompt_tokens


def _is_under_way(chunk: Chunk) -> bool:
    """Whether an earlier step has computed something of the sequence."""
    return chunk.sequence.num_output_tokens > 0 or chunk.start > chunk.sequence.num_cached_tokens
