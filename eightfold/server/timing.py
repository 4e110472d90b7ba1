"""How long requests take, counted as they are answered: plain lists of integers, which `/metrics` reads when it is asked."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial


@dataclass(slots=True)
class Histogram:
    """Counts of values by bucket.

    Attributes:
        bounds: the upper ends of the buckets, ascending; a last bucket without an end follows.
        counts: how many values each bucket got, not cumulated.
        total: the sum of all values.
    """

    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value. One that equals a bound belongs below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


# vLLM's edges, so that its boards show ours; decode steps of 1 to 8 ms need some below its first one of inter-token latency.
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
_INTER_TOKEN = (
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))


@dataclass(slots=True)
class RequestTimes:
    """When things happened to one request, by the clock of `time.monotonic`.

    Attributes:
        submitted: when it was handed to the engine.
        num_prompt_tokens: of its prompt.
        max_tokens: most tokens that it may generate.
        started: when the step began that computed its first tokens; None while it waits.
        first: when its first token arrived.
        last: when its last token so far arrived.
        num_tokens: generated so far.
    """

    submitted: float
    num_prompt_tokens: int
    max_tokens: int
    started: float | None = None
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class Recorder:
    """The histograms of all requests. Times are in seconds."""

    time_to_first_token: Histogram = field(default_factory=partial(Histogram, _FIRST_TOKEN))
    inter_token: Histogram = field(default_factory=partial(Histogram, _INTER_TOKEN))
    per_output_token: Histogram = field(default_factory=partial(Histogram, _INTER_TOKEN))
    end_to_end: Histogram = field(default_factory=partial(Histogram, _REQUEST))
    queue: Histogram = field(default_factory=partial(Histogram, _REQUEST))
    inference: Histogram = field(default_factory=partial(Histogram, _REQUEST))
    prefill: Histogram = field(default_factory=partial(Histogram, _REQUEST))
    decode: Histogram = field(default_factory=partial(Histogram, _REQUEST))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    generation_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    max_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))

    def start(self, times: RequestTimes, now: float) -> None:
        """A request left the queue."""
        if times.started is None:
            times.started = now
            self.queue.observe(max(0.0, now - times.submitted))

    def token(self, times: RequestTimes, now: float) -> None:
        """A token of a request arrived."""
        if times.num_tokens:
            self.inter_token.observe(now - times.last)
        else:
            times.first = now
            self.time_to_first_token.observe(now - times.submitted)
        times.last = now
        times.num_tokens += 1

    def finish(self, times: RequestTimes, now: float) -> None:
        """A request ended, in whatever way."""
        self.end_to_end.observe(now - times.submitted)
        self.prompt_tokens.observe(times.num_prompt_tokens)
        self.generation_tokens.observe(times.num_tokens)
        self.max_tokens.observe(times.max_tokens)
        if times.started is not None and times.first is not None:
            self.inference.observe(times.last - times.started)
            self.prefill.observe(times.first - times.started)
            self.decode.observe(times.last - times.first)
            if times.num_tokens > 1:
                self.per_output_token.observe((times.last - times.first) / (times.num_tokens - 1))
