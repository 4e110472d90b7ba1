"""`eightfold bench throughput`: many requests of unequal lengths on one engine without a server, in bf16 and in MXFP8.

Lengths are those of conversations, as `eightfold bench serve` has them, or fixed; prompts are random token ids, so that a model
needs no tokenizer. Requests are all there from the beginning, or come as a Poisson process. Figures and their names are those
of `bench serve`; a token counts as come when the step that made it ends. Bytes are counted by `eightfold.benchmarks.moved`, the
experts of a mixture as even choices would touch them, and set beside the bandwidth of a large copy, the best of those before
and after each model.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eightfold.benchmarks.measures import Answer, render, summarize
from eightfold.benchmarks.moved import Bytes, Moved
from eightfold.benchmarks.offline import (
    bandwidth_of,
    check_profile,
    device_of,
    engines,
    print_operators,
    synchronize,
    trace_file,
    variants,
)
from eightfold.benchmarks.profiling import profiled
from eightfold.benchmarks.report import print_report
from eightfold.benchmarks.traffic import CONVERSATIONS, Mix, arrivals
from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.errors import InputError
from eightfold.types import Progress, Request, SamplingParams

_PROFILED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What to ask of the engine.

    Attributes:
        num_prompts: requests.
        request_rate: requests a second of a Poisson process; infinity has all there from the beginning.
        mix: lengths; a pair that does not fit into the model's context is cut.
        num_warmups: requests before, all at once, that are not measured.
        seed: of lengths, prompts and arrivals.
        profile: where a Chrome trace of the first steps goes, if anywhere.
    """

    num_prompts: int = 200
    request_rate: float = math.inf
    mix: Mix = CONVERSATIONS
    num_warmups: int = 1
    seed: int = 0
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_prompts", 1), ("num_warmups", 0)):
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')}", got=getattr(self, name), expected=f"at least {least}")
        check_profile(self.profile)
        if not self.request_rate > 0:
            raise InputError("--request-rate", got=self.request_rate, expected="more than 0")


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine did with all requests.

    Attributes:
        answers: one for each request, in the order of their arrival.
        start: on the clock of the answers.
        duration: seconds until the last token.
        moved: bytes of all steps.
        steps: how many there were.
        step_seconds: time in the runs of these.
        gap_seconds: time between runs while something was under way.
    """

    answers: Sequence[Answer]
    start: float
    duration: float
    moved: Moved
    steps: int
    step_seconds: float
    gap_seconds: float


def run(config: EngineConfig, settings: Settings, *, only: str | None = None, report: Progress | None = None) -> None:
    """Measure and print: each model's figures, a table of both, and one JSON line.

    Raises:
        InputError: a model or a value that cannot be used.
    """
    found = variants(replace(config, disable_prefix_cache=True), only)
    device = device_of(config)
    bandwidth = bandwidth_of(device)
    rows: list[dict[str, Any]] = []
    for name, engine in engines(found, report):
        done = measure(engine, settings)
        summary = summarize(done.answers, start=done.start, duration=done.duration, limits={})
        print(f"{name}\n\n{render(summary, done.answers)}\n")
        rows.append({"weights": name, **summary, **_of_steps(done)})
        if settings.profile is not None:
            file = trace_file(settings.profile, (name,), is_only=len(found) == 1)
            print_operators(name, profile(engine, settings, file))
        del engine
        bandwidth = max(bandwidth, bandwidth_of(device))
    _print(config.model, settings, bandwidth, [row | {"limit_share": row["bytes_per_second"] / bandwidth} for row in rows])


def measure(engine: Engine, settings: Settings) -> Load:
    """Put all requests through an engine; nobody else uses it."""
    random = np.random.default_rng(settings.seed)
    _put_through(engine, _requests(engine, settings, settings.num_warmups, random, "warm"), [0.0] * settings.num_warmups)
    requests = _requests(engine, settings, settings.num_prompts, random, "")
    return _put_through(engine, requests, arrivals(settings.num_prompts, settings.request_rate, random))


def profile(engine: Engine, settings: Settings, file: Path) -> list[Any]:
    """Trace the first steps with all requests there at once."""
    for request in _requests(engine, settings, settings.num_prompts, np.random.default_rng(settings.seed), "traced"):
        engine.add(request)

    def some_steps() -> None:
        for _ in range(_PROFILED_STEPS):
            if engine.has_work:
                engine.step()

    operators = profiled(some_steps, file, engine.loaded.kernels.hardware.device)
    for sequence in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.abort(sequence.request.request_id)
    return operators


def _requests(engine: Engine, settings: Settings, count: int, random: np.random.Generator, label: str) -> list[Request]:
    longest = engine.scheduler.max_sequence_tokens
    made = []
    inputs, outputs = settings.mix.input.sample(count, random), settings.mix.output.sample(count, random)
    for index, (input_len, output_len) in enumerate(zip(inputs, outputs, strict=True)):
        num_prompt = min(input_len, longest - 1)
        prompt = random.integers(engine.vocab_size, size=num_prompt).tolist()
        params = SamplingParams(max_tokens=min(output_len, longest - num_prompt), temperature=0.0, ignore_eos=True)
        made.append(engine.make_request(f"{label}{index}", prompt, params))
    return made


def _put_through(engine: Engine, requests: Sequence[Request], times: Sequence[float]) -> Load:
    device, counted = engine.loaded.kernels.hardware.device, Bytes(engine.loaded)
    step_times = engine.scheduler.counters.steps
    step_times.rest()
    waiting = deque(zip(times, requests, strict=True))
    answers: dict[str, Answer] = {}
    moved, steps, step_seconds, gap_seconds = Moved(), 0, 0.0, 0.0
    synchronize(device)
    start = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter()
        while waiting and start + waiting[0][0] <= now:
            arrival, request = waiting.popleft()
            engine.add(request)
            # A request that came while a step ran was due then, and waited for the step's end.
            due = start + arrival
            answers[request.request_id] = Answer(due, due, prompt_tokens=len(request.prompt_token_ids))
        if not engine.has_work:
            time.sleep(max(0.0, start + waiting[0][0] - time.perf_counter()))
            continue
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            answer = answers[event.request_id]
            answer.frame_times.append(now)
            answer.completion_tokens += event.token_id is not None
            if event.finish_reason is not None:
                answer.ended, answer.finish_reason = now, event.finish_reason
        if (step := step_times.last) is not None:
            moved, steps = moved + counted.of(step), steps + 1
            step_seconds, gap_seconds = step_seconds + step.seconds, gap_seconds + step.gap_seconds
    synchronize(device)
    duration = time.perf_counter() - start
    return Load(list(answers.values()), start, duration, moved, steps, step_seconds, gap_seconds)


def _of_steps(done: Load) -> dict[str, float]:
    steps = max(done.steps, 1)
    return {
        "steps": done.steps,
        "mean_step_ms": done.step_seconds / steps * 1e3,
        "weight_bytes_per_step": done.moved.weights / steps,
        "cache_bytes_per_step": done.moved.cache / steps,
        "bytes_per_second": done.moved.total / done.duration,
        "host_gap_share": done.gap_seconds / done.duration,
    }


def _print(model: str, settings: Settings, bandwidth: float, rows: Sequence[dict[str, Any]]) -> None:
    columns: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("weights", lambda row: str(row["weights"])),
        ("output tok/s", lambda row: f"{row['output_throughput']:,.1f}"),
        ("of bf16", lambda row: f"{row['output_throughput'] / rows[0]['output_throughput']:.2f}" if _has_bf16(rows) else "-"),
        ("all tok/s", lambda row: f"{row['total_token_throughput']:,.1f}"),
        ("TTFT p50 ms", lambda row: f"{row['median_ttft_ms']:,.0f}"),
        ("ms/step", lambda row: f"{row['mean_step_ms']:.2f}"),
        ("weights MB", lambda row: f"{row['weight_bytes_per_step'] / 1e6:,.1f}"),
        ("cache MB", lambda row: f"{row['cache_bytes_per_step'] / 1e6:,.1f}"),
        ("of copy", lambda row: f"{row['limit_share']:.2f}"),
        ("gap", lambda row: f"{row['host_gap_share']:.1%}"),
    )
    table = [[show(row) for _, show in columns] for row in rows]
    said = {
        "num_prompts": settings.num_prompts,
        "request_rate": settings.request_rate if math.isfinite(settings.request_rate) else "inf",
        "mix": settings.mix.describe(),
        "seed": settings.seed,
    }
    title = f"throughput {model}, {settings.num_prompts} requests, copy {bandwidth / 1e9:,.1f} GB/s"
    result = {
        "benchmark": "throughput",
        "model": model,
        "settings": said,
        "copy_bytes_per_second": bandwidth,
        "rows": list(rows),
    }
    print_report(title, [name for name, _ in columns], table, result)


def _has_bf16(rows: Sequence[dict[str, Any]]) -> bool:
    return bool(rows[0]["weights"] == "bf16")
