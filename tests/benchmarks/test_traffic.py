"""Lengths, passages and arrivals: their distributions, and that a seed decides them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eightfold.benchmarks.traffic import (
    CONVERSATIONS,
    Fixed,
    Lognormal,
    Mix,
    Passages,
    TokenRate,
    arrivals,
    make_prompts,
)
from eightfold.errors import InputError

TEXT = " ".join(f"word{number}" for number in range(500))


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_lognormal_lengths_have_their_median_width_and_range() -> None:
    lengths = np.asarray(Lognormal(100, 0.5, 1, 10**6).sample(20_000, random()))
    assert abs(np.median(lengths) - 100) < 2
    assert abs(np.log(lengths).std() - 0.5) < 0.02
    cut = Lognormal(100, 2.0, 50, 200).sample(1000, random())
    assert (min(cut), max(cut)) == (50, 200)


def test_conversations_have_the_means_that_are_documented() -> None:
    for distribution, mean in ((CONVERSATIONS.input, 160), (CONVERSATIONS.output, 335)):
        assert abs(np.mean(distribution.sample(100_000, random())) / mean - 1) < 0.02


def test_poisson_arrivals_have_their_rate_and_exponential_gaps() -> None:
    times = np.asarray(arrivals(20_000, 4.0, random()))
    gaps = np.diff(times)
    assert abs(20_000 / times[-1] - 4.0) < 0.1
    assert abs(gaps.std() / gaps.mean() - 1) < 0.03
    assert arrivals(3, math.inf, random()) == [0.0, 0.0, 0.0]


def test_a_passage_has_its_length_goes_round_and_begins_anywhere() -> None:
    passages = Passages(TEXT, random())
    taken = [passages.take(50) for _ in range(20)]
    assert all(len(text) == 50 for text in taken)
    assert len({text[:12] for text in taken}) > 15
    assert all(text.startswith("word") for text in taken)
    long = passages.take(2 * len(TEXT))
    assert len(long) == 2 * len(TEXT)
    assert "word499 word0 " in long


def test_a_short_text_is_refused() -> None:
    with pytest.raises(InputError, match="--text: got 2 words; expected at least 100"):
        Passages("two words", random())


def test_the_servers_way_to_count_is_found_from_two_prompts() -> None:
    rate = TokenRate.fit((100, 35), (1000, 260))
    assert (rate.per_token, rate.overhead) == (4.0, 10.0)
    assert rate.characters(110) == 400
    assert rate.characters(1) == 1  # below what the template alone takes
    with pytest.raises(InputError, match=r"usage\.prompt_tokens: got 7 for 100 characters and 7 for 1000; expected more"):
        TokenRate.fit((100, 7), (1000, 7))


def test_a_seed_decides_everything() -> None:
    def make(seed: int) -> list[object]:
        source = random(seed)
        rate = TokenRate(4.0, 10.0)
        return list(make_prompts(Passages(TEXT, source), CONVERSATIONS, rate, count=5, rate=2.0, random=source))

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_prompts_have_the_lengths_of_the_mix() -> None:
    source = random()
    mix = Mix(Fixed(60), Fixed(7))
    prompts = make_prompts(Passages(TEXT, source), mix, TokenRate(4.0, 10.0), count=3, rate=1.0, random=source)
    assert [(len(prompt.text), prompt.input_len, prompt.output_len) for prompt in prompts] == [(200, 60, 7)] * 3
    assert sorted(prompt.arrival for prompt in prompts) == [prompt.arrival for prompt in prompts]
    assert mix.describe() == {"input": {"length": 60}, "output": {"length": 7}}
