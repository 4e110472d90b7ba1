"""How paces are computed, with an engine whose time is known."""

from __future__ import annotations

import pytest

from eightfold.benchmarks.generation import measure


class Clock:
    """An engine that takes 1 ms a prompt token and 10 ms a generated one, on a clock of its own."""

    def __init__(self, answer: str = " Paris.") -> None:
        self.now = 0.0
        self.answer = answer

    def generate(self, text: str, max_tokens: int) -> tuple[int, int, str]:
        num_prompt = len(text.split())
        self.now += 0.001 * num_prompt + 0.010 * (max_tokens - 1)
        return num_prompt, max_tokens, self.answer


def test_prefill_and_decode_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    speed = measure(clock.generate, prefill=512, decode=50, repeats=2)
    assert abs(speed.prefill - 1000) < 1
    assert abs(speed.decode - 100) < 1


def test_an_engine_that_answers_nonsense_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match=r"' Rome\.', so that its speed means nothing"):
        measure(Clock(" Rome.").generate, prefill=512, decode=50, repeats=1)
