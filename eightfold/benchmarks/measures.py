"""What a load test measured: from the times of single answers to percentiles, rates, goodput, a table and a JSON record.

Names follow vLLM's `bench serve` where the meaning is the same. All times are in milliseconds in a summary and in seconds in an
`Answer`. TTFT runs from the moment a request is sent to its first text; ITL is each gap between two frames with text of one
answer; TPOT is the time after the first text over the tokens after the first; E2EL runs from sending to the end of the stream.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from eightfold.config import refuse_unknown
from eightfold.errors import InputError

PERCENTILES = (50, 90, 95, 99)
METRICS: Mapping[str, str] = MappingProxyType(
    {
        "ttft": "time to first token",
        "tpot": "time per output token",
        "itl": "inter-token latency",
        "e2el": "end to end",
    }
)


@dataclass(slots=True)
class Answer:
    """One request that ended, well or not. Times are seconds on one clock.

    Attributes:
        scheduled: when it was to be sent.
        sent: when it was sent.
        ended: when its stream ended.
        frame_times: when each frame with text came.
        prompt_tokens, cached_tokens, completion_tokens: the server's own count.
        finish_reason: the server's word.
        error: the kind of failure; empty where there was none.
        detail: what the server or the system said of the failure.
    """

    scheduled: float
    sent: float = 0.0
    ended: float = 0.0
    frame_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    detail: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.frame_times[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is none."""
        later = self.completion_tokens - 1
        return (self.frame_times[-1] - self.frame_times[0]) / later if later > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between frames with text."""
        return [after - before for before, after in pairwise(self.frame_times)]


def parse_goodput(words: Iterable[str]) -> dict[str, float]:
    """Limits in milliseconds from words such as `ttft:500`, several in a word with commas.

    For `itl` a request is measured by the 99th percentile of its own gaps.

    Raises:
        InputError: an unknown metric, a limit that is no positive number, or a metric given twice.
    """
    limits: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        name, _, value = word.partition(":")
        name = "e2el" if name == "e2e" else name
        refuse_unknown("goodput metric", [name], [*METRICS])
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise InputError("--goodput", got=word, expected="a metric and its limit in milliseconds, such as ttft:500")
        if name in limits:
            raise InputError("--goodput", got=f"two limits for {name}", expected="one")
        limits[name] = limit
    return limits


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether a completed answer kept every limit (milliseconds)."""
    gaps = answer.gaps
    values = {
        "ttft": answer.ttft,
        "tpot": answer.tpot or 0.0,
        "itl": float(np.percentile(gaps, 99)) if gaps else 0.0,
        "e2el": answer.e2el,
    }
    return all(values[name] * 1e3 <= limit for name, limit in limits.items())


def summarize(answers: Sequence[Answer], *, start: float, duration: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Every figure of a run.

    Args:
        answers: what ended.
        start: when the run began, on the answers' clock.
        duration: seconds from the start to the end.
        limits: of goodput, milliseconds; empty for none.

    Returns:
        Plain values that JSON has; None where nothing was measured.
    """
    done = [answer for answer in answers if not answer.error]
    output_tokens = sum(answer.completion_tokens for answer in done)
    input_tokens = sum(answer.prompt_tokens for answer in done)
    frames = sum(len(answer.frame_times) for answer in done)
    seconds = duration or math.inf
    samples: dict[str, list[float]] = {
        "ttft": [answer.ttft for answer in done],
        "tpot": [tpot for answer in done if (tpot := answer.tpot) is not None],
        "itl": [gap for answer in done for gap in answer.gaps],
        "e2el": [answer.e2el for answer in done],
    }
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(answers) - len(done),
        "errors": dict(Counter(answer.error for answer in answers if answer.error).most_common()),
        "total_input_tokens": input_tokens,
        "total_cached_tokens": sum(answer.cached_tokens for answer in done),
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(is_good(answer, limits) for answer in done) / seconds if limits else None,
        "goodput_limits_ms": dict(limits) or None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
        "max_output_tokens_per_s": _busiest_second(done, start),
        "max_concurrent_requests": _most_at_once(answers),
        "tokens_per_frame": output_tokens / frames if frames else None,
        "p99_late_ms": _percentile([answer.sent - answer.scheduled for answer in answers], 99),
        **{key: value for name, values in samples.items() for key, value in _statistics(name, values).items()},
    }


def details(answers: Sequence[Answer], start: float) -> dict[str, Any]:
    """What each request measured, in seconds: lists of one length, in the order of sending."""
    ordered = sorted(answers, key=lambda answer: answer.sent)
    return {
        "start_times": [answer.sent - start for answer in ordered],
        "input_lens": [answer.prompt_tokens for answer in ordered],
        "output_lens": [answer.completion_tokens for answer in ordered],
        "ttfts": [answer.ttft if answer.frame_times else None for answer in ordered],
        "itls": [answer.gaps for answer in ordered],
        "e2els": [answer.e2el for answer in ordered],
        "finish_reasons": [answer.finish_reason for answer in ordered],
        "error_details": [f"{answer.error}: {answer.detail}" if answer.error else "" for answer in ordered],
    }


def render(summary: Mapping[str, Any], answers: Sequence[Answer]) -> str:
    """The figures as a table, with an example of each kind of failure."""
    rows = [
        ("requests completed", f"{summary['completed']}"),
        ("requests failed", f"{summary['failed']}"),
        ("duration, s", f"{summary['duration']:.2f}"),
        ("input tokens", f"{summary['total_input_tokens']:,}"),
        ("  of them cached", f"{summary['total_cached_tokens']:,}"),
        ("output tokens", f"{summary['total_output_tokens']:,}"),
        ("requests/s", f"{summary['request_throughput']:.2f}"),
        ("output tokens/s", f"{summary['output_throughput']:,.1f}"),
        ("  in the busiest second", f"{summary['max_output_tokens_per_s']:,}"),
        ("input and output tokens/s", f"{summary['total_token_throughput']:,.1f}"),
        ("most requests at once", f"{summary['max_concurrent_requests']}"),
        ("output tokens a frame", _shown(summary["tokens_per_frame"])),
    ]
    if summary["request_goodput"] is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in summary["goodput_limits_ms"].items())
        rows.append((f"goodput, requests/s ({limits})", f"{summary['request_goodput']:.2f}"))
    widths = max(len(name) for name, _ in rows), max(len(value) for _, value in rows)
    lines = [f"{name:{widths[0]}}  {value:>{widths[1]}}" for name, value in rows]
    columns = ("mean", *(f"p{percentile}" for percentile in PERCENTILES))
    lines += ["", f"{'milliseconds':20}" + "".join(f"{column:>10}" for column in columns)]
    for name, title in METRICS.items():
        keys = (f"mean_{name}_ms", *(_key(name, percentile) for percentile in PERCENTILES))
        lines.append(f"{title:20}" + "".join(f"{_shown(summary[key]):>10}" for key in keys))
    for kind, count in summary["errors"].items():
        example = next(answer.detail for answer in answers if answer.error == kind)
        lines.append(f"\n{count} failed: {kind}" + (f", such as: {example[:300]}" if example else ""))
    return "\n".join(lines)


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    values = np.asarray(seconds) * 1e3
    found: dict[str, float | None] = {
        f"mean_{name}_ms": float(values.mean()) if values.size else None,
        f"std_{name}_ms": float(values.std()) if values.size else None,
    }
    for percentile in PERCENTILES:
        found[_key(name, percentile)] = _percentile(seconds, percentile)
    return found


def _key(name: str, percentile: int) -> str:
    return f"median_{name}_ms" if percentile == 50 else f"p{percentile}_{name}_ms"


def _percentile(seconds: Sequence[float], percentile: int) -> float | None:
    return float(np.percentile(seconds, percentile)) * 1e3 if len(seconds) else None


def _busiest_second(answers: Sequence[Answer], start: float) -> int:
    """Output tokens of the best of the seconds since the start; a frame counts as its answer's mean."""
    times = np.asarray([time - start for answer in answers for time in answer.frame_times])
    weights = np.asarray([answer.completion_tokens / len(answer.frame_times) for answer in answers for _ in answer.frame_times])
    return round(float(np.bincount(times.astype(np.int64), weights=weights).max())) if times.size else 0


def _most_at_once(answers: Sequence[Answer]) -> int:
    changes = sorted([(answer.sent, 1) for answer in answers] + [(answer.ended, -1) for answer in answers])
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
