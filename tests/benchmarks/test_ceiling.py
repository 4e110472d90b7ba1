"""How the age of a token follows from its time of arrival."""

from __future__ import annotations

import pytest

from eightfold.benchmarks.ceiling import AGE_MS, KEEP_UP_MS, ages_ms, figures_of
from eightfold.benchmarks.measures import Answer
from eightfold.benchmarks.serve import Run
from eightfold.errors import InputError


def answer(*ages: float, error: str = "") -> Answer:
    """Frames of successive steps of 20 ms, each with its age in milliseconds."""
    times = [1.0 + 0.02 * number + age / 1e3 for number, age in enumerate(ages)]
    return Answer(1.0, 1.0, times[-1], times, 5, 0, len(times), error=error)


def test_the_age_of_a_frame_is_the_rest_of_its_time() -> None:
    assert ages_ms([answer(1.0, 2.5), answer(3.0)], AGE_MS) == pytest.approx([1.0, 2.5, 3.0])
    figures = figures_of(Run([answer(1.0, 2.0, 3.0)], start=1.0, duration=0.1, client_share=0.2), AGE_MS)
    assert figures["median_age_ms"] == pytest.approx(2.0)
    assert figures["output_throughput"] == pytest.approx(30.0)
    assert figures["client_share"] == 0.2


def test_a_short_step_tells_no_age() -> None:
    figures = figures_of(Run([answer(1.0, 2.0)], start=1.0, duration=0.1), KEEP_UP_MS)
    assert figures["median_age_ms"] is None
    assert figures["tokens_per_frame"] == 1.0


def test_failed_requests_are_no_measurement() -> None:
    with pytest.raises(InputError, match=r"the server: got failed requests: \{'http 429': 1\}; expected none"):
        figures_of(Run([answer(1.0, error="http 429")], duration=0.1), AGE_MS)
