"""What a load generator asks for, and when: lengths, prompts of real text, and times of arrival, all from one seed.

The lengths of a conversation are lognormal: many are short and a few are very long. The medians and widths of `CONVERSATIONS`
are ours; their means, about 160 tokens asked and 335 answered, are near those reported for ShareGPT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from eightfold.errors import InputError


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths in tokens: `exp(N(ln median, sigma))`, cut to a range.

    Attributes:
        median: half of the lengths are below it.
        sigma: width of the logarithm.
        shortest, longest: what is outside becomes these.
    """

    median: float
    sigma: float
    shortest: int
    longest: int

    def sample(self, count: int, random: np.random.Generator) -> list[int]:
        """`count` lengths."""
        lengths = np.exp(random.normal(math.log(self.median), self.sigma, count))
        return [int(length) for length in np.clip(np.rint(lengths), self.shortest, self.longest)]


@dataclass(frozen=True, slots=True)
class Fixed:
    """One length for all."""

    length: int

    def sample(self, count: int, random: np.random.Generator) -> list[int]:  # noqa: ARG002, as Lognormal
        """`count` times the length."""
        return [self.length] * count


@dataclass(frozen=True, slots=True)
class Mix:
    """The lengths of prompts and of answers, in tokens."""

    input: Lognormal | Fixed
    output: Lognormal | Fixed

    def describe(self) -> dict[str, dict[str, float]]:
        """The parameters, for a report."""
        return {"input": asdict(self.input), "output": asdict(self.output)}


CONVERSATIONS = Mix(Lognormal(80, 1.2, 4, 2048), Lognormal(210, 1.0, 4, 2048))
"""Means of about 160 and 335 tokens."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to come.

    Attributes:
        text: what is asked.
        input_len: tokens that it should have, about.
        output_len: tokens to ask for.
        arrival: seconds after the start; 0 for all where a closed loop decides.
    """

    text: str
    input_len: int
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenRate:
    """How the server counts: tokens of a prompt are about `overhead + characters / per_token`.

    Attributes:
        per_token: characters of the text a token.
        overhead: tokens of a chat template, or of a BOS.
    """

    per_token: float
    overhead: float

    def characters(self, tokens: int) -> int:
        """Of the text for a prompt of so many tokens."""
        return max(1, round((tokens - self.overhead) * self.per_token))

    @staticmethod
    def fit(short: tuple[int, int], long: tuple[int, int]) -> TokenRate:
        """From two prompts, each as (characters, tokens).

        Raises:
            InputError: more text has no more tokens, so that the server does not count.
        """
        characters, tokens = long[0] - short[0], long[1] - short[1]
        if tokens <= 0:
            raise InputError(
                "usage.prompt_tokens",
                got=f"{short[1]} for {short[0]} characters and {long[1]} for {long[0]}",
                expected="more tokens for more text",
            )
        per_token = characters / tokens
        return TokenRate(per_token, max(0.0, short[1] - short[0] / per_token))


class Passages:
    """Passages of a text, each from a place of its own, so that no two prompts begin alike by design.

    Args:
        text: real text; it goes round where a passage reaches its end.
        random: chooses the places.
    """

    def __init__(self, text: str, random: np.random.Generator) -> None:
        self._words = text.split()
        if len(self._words) < 100:
            raise InputError("--text", got=f"{len(self._words)} words", expected="at least 100")
        self._random = random

    def take(self, characters: int) -> str:
        """A passage of exactly this many characters."""
        place = int(self._random.integers(len(self._words)))
        taken: list[str] = []
        length = -1
        while length < characters:
            word = self._words[place]
            taken.append(word)
            length += len(word) + 1
            place = (place + 1) % len(self._words)
        return " ".join(taken)[:characters]


def arrivals(count: int, rate: float, random: np.random.Generator) -> list[float]:
    """Seconds after the start at which requests come.

    Args:
        count: requests.
        rate: requests a second of a Poisson process; infinity has all come at once.
        random: chooses the gaps, which are exponential.
    """
    if math.isinf(rate):
        return [0.0] * count
    return [float(time) for time in np.cumsum(random.exponential(1 / rate, count))]


def make_prompts(
    passages: Passages, mix: Mix, tokens: TokenRate, *, count: int, rate: float, random: np.random.Generator
) -> Sequence[Prompt]:
    """The requests of a run, in the order of their arrival."""
    inputs, outputs = mix.input.sample(count, random), mix.output.sample(count, random)
    times = arrivals(count, rate, random)
    return [
        Prompt(passages.take(tokens.characters(input_len)), input_len, output_len, time)
        for input_len, output_len, time in zip(inputs, outputs, times, strict=True)
    ]
