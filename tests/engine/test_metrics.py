"""Kinds of steps, their times on a clock that the test moves, and gaps."""

from __future__ import annotations

import pytest

from eightfold.engine.metrics import Step, StepTimes
from eightfold.types import Batch, Chunk, Request, SamplingParams, Sequence
from tests.pretended import counting, make_llm


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def chunk(num_prompt: int, num_output: int, start: int, length: int) -> Chunk:
    sequence = Sequence.start(Request("r", tuple(range(num_prompt)), SamplingParams(), 0))
    sequence.token_ids += [0] * num_output
    return Chunk(sequence, start, length, samples=True)


DECODE, FIRST, LAST_OF_PROMPT = chunk(4, 1, 4, 1), chunk(8, 0, 0, 8), chunk(8, 0, 7, 1)
RECOMPUTED = chunk(4, 3, 0, 7)


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ((DECODE,), "decode"),
        ((DECODE, DECODE), "decode"),
        ((FIRST,), "prefill"),
        ((LAST_OF_PROMPT,), "prefill"),
        ((RECOMPUTED,), "prefill"),
        ((DECODE, FIRST), "mixed"),
        ((LAST_OF_PROMPT, DECODE), "mixed"),
    ],
)
def test_a_step_has_the_kind_of_its_chunks(chunks: tuple[Chunk, ...], kind: str) -> None:
    times = StepTimes()
    with times.measure(Batch(chunks)):
        pass
    assert times.last is not None
    assert times.last.kind == kind


def test_times_and_gaps_add_up_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(monkeypatch), StepTimes()
    for batch, before, run in (((FIRST,), 9.0, 3.0), ((DECODE,), 0.5, 1.0), ((DECODE, DECODE), 0.25, 2.0)):
        clock.pass_by(before)
        with times.measure(Batch(batch)):
            clock.pass_by(run)
    assert times.last == Step("decode", 2, 2, 10, 2.0, 0.25)
    prefill, decode = times.totals["prefill"], times.totals["decode"]
    assert (prefill.steps, prefill.tokens, prefill.seconds, prefill.gap_seconds) == (1, 8, 3.0, 0.0)
    assert (decode.steps, decode.tokens, decode.seconds, decode.gap_seconds) == (2, 3, 3.0, 0.75)
    assert times.totals["mixed"].steps == 0


def test_nobody_waits_before_a_sequence_that_begins_or_after_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(monkeypatch), StepTimes()
    for batch, rests in (((FIRST,), False), ((FIRST,), False), ((DECODE,), True)):
        if rests:
            times.rest()
        clock.pass_by(5.0)
        with times.measure(Batch(batch)):
            clock.pass_by(1.0)
    assert sum(totals.gap_seconds for totals in times.totals.values()) == 0


def test_a_step_that_raises_does_not_count_and_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, times = Clock(monkeypatch), StepTimes()
    with times.measure(Batch((FIRST,))):
        pass
    with pytest.raises(KeyError), times.measure(Batch((DECODE,))):
        raise KeyError
    clock.pass_by(7.0)
    with times.measure(Batch((DECODE,))):
        pass
    assert (times.totals["decode"].steps, times.totals["decode"].gap_seconds) == (1, 0.0)


def test_the_engine_counts_its_steps() -> None:
    llm = make_llm(counting(), chunked_prefill_size=4)
    llm.generate([[5] * 10, [6]], SamplingParams(max_tokens=6))
    totals = llm.engine.scheduler.counters.steps.totals
    assert sum(item.tokens for item in totals.values()) == 10 + 1 + 2 * 5
    assert totals["prefill"].steps >= 2
    assert totals["decode"].steps >= 4
    assert totals["decode"].gap_seconds > 0
    assert totals["decode"].seconds > 0
