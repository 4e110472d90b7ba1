"""`eightfold bench latency`: prefill and decode by batch size, in bf16 and in MXFP8, beside what the memory can do.

Prefill is the time from the first step to the first token of the last of a batch of prompts. Decode is the pace of steps in
which every sequence of the batch gets one token, after prompts of their own. Each is done several times, and the fastest time
counts: other work on a machine only ever slows a run. All that the engine does is in the times, sampling too; text is not.

Bytes are counted by `eightfold.benchmarks.moved`, the experts of a mixture as its routers chose them in one further step. The
limit is the time of these bytes at the bandwidth of a large copy, the best of those before and after each model. Decode can
come near it; prefill is bound by arithmetic, and its share says only that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from eightfold.benchmarks.moved import Bytes, Moved, watched_routers
from eightfold.benchmarks.offline import (
    bandwidth_of,
    check_profile,
    device_of,
    engines,
    print_operators,
    random_prompts,
    synchronize,
    trace_file,
    variants,
)
from eightfold.benchmarks.profiling import profiled
from eightfold.benchmarks.report import print_report
from eightfold.config import DEFAULT_CHUNKED_PREFILL_SIZE, DEFAULT_PAGE_SIZE, EngineConfig
from eightfold.engine.engine import Engine
from eightfold.engine.metrics import Step
from eightfold.errors import InputError
from eightfold.types import Progress, SamplingParams

Phase: TypeAlias = Literal["prefill", "decode"]
_PROFILED_STEPS = 5
_WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure.

    Attributes:
        batch_sizes: sequences that decode together.
        input_len: tokens of their prompts.
        output_len: steps of decoding that are timed.
        prefill_batch_sizes: prompts that are computed together; empty takes `batch_sizes`.
        prefill_input_len: tokens of each; None takes `input_len`.
        num_iters: repetitions that are timed.
        num_iters_warmup: repetitions before.
        seed: of the prompts.
        profile: where a Chrome trace of each case goes, if anywhere.
    """

    batch_sizes: tuple[int, ...] = (1, 16, 64)
    input_len: int = 128
    output_len: int = 32
    prefill_batch_sizes: tuple[int, ...] = ()
    prefill_input_len: int | None = None
    num_iters: int = 3
    num_iters_warmup: int = 1
    seed: int = 0
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "prefill_input_len", "num_iters"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')}", got=value, expected="at least 1")
        if self.num_iters_warmup < 0:
            raise InputError("--num-iters-warmup", got=self.num_iters_warmup, expected="at least 0")
        check_profile(self.profile)
        for size in (*self.batch_sizes, *self.prefill_batch_sizes):
            if size < 1:
                raise InputError("--batch-size", got=size, expected="at least 1")

    @property
    def cases(self) -> tuple[tuple[Phase, int, int], ...]:
        """Phase, batch size and tokens of a prompt, in the order of measuring."""
        length = self.prefill_input_len or self.input_len
        prefills: tuple[tuple[Phase, int, int], ...] = tuple(
            ("prefill", size, length) for size in self.prefill_batch_sizes or self.batch_sizes
        )
        return (*prefills, *(("decode", size, self.input_len) for size in self.batch_sizes))


@dataclass(frozen=True, slots=True)
class Row:
    """One case of one model.

    Attributes:
        weights: "bf16" or "mxfp8".
        phase: "prefill" or "decode".
        batch_size: sequences.
        input_len: tokens of a prompt.
        seconds: of the whole prefill, or of one step of decoding: the fastest repetition.
        all_seconds: of every repetition.
        tokens_per_second: of prompts, or generated.
        steps: that the prefill took, or that were timed.
        weight_bytes: that a step moves, on average.
        cache_bytes: the same of keys, values and states.
        host_gap_share: of the time, between runs.
        experts: different experts that a step touches, on average over the mixtures; None where there are none.
    """

    weights: str
    phase: Phase
    batch_size: int
    input_len: int
    seconds: float
    all_seconds: tuple[float, ...]
    tokens_per_second: float
    steps: int
    weight_bytes: float
    cache_bytes: float
    host_gap_share: float
    experts: float | None

    def limit_seconds(self, bandwidth: float) -> float:
        """What `seconds` would be if all bytes moved at `bandwidth`, in bytes a second."""
        return (self.weight_bytes + self.cache_bytes) * (self.steps if self.phase == "prefill" else 1) / bandwidth


@dataclass(frozen=True, slots=True)
class _Timed:
    """One repetition: seconds, what steps moved together, how many there were, and how long the device waited."""

    seconds: float
    moved: Moved
    steps: int
    gap: float


def sized(config: EngineConfig, settings: Settings) -> EngineConfig:
    """The configuration with room for the largest batch, and no prefix cache, wherever the user did not say otherwise."""
    page, budget = (
        config.page_size or DEFAULT_PAGE_SIZE,
        config.chunked_prefill_size or min(DEFAULT_CHUNKED_PREFILL_SIZE.values()),
    )
    tokens = [
        size * -(-(length + (1 if phase == "prefill" else _answer_len(settings, size, length, budget))) // page) * page
        for phase, size, length in settings.cases
    ]
    most = max(size for _, size, _ in settings.cases)
    return replace(
        config,
        max_running_requests=config.max_running_requests or most,
        max_total_tokens=config.max_total_tokens or max(tokens) + page,
        disable_prefix_cache=True,
    )


def run(config: EngineConfig, settings: Settings, *, only: str | None = None, report: Progress | None = None) -> None:
    """Measure and print: the operators of each case where a profile is wanted, a table, and one JSON line.

    Raises:
        InputError: a model or a value that cannot be used; a batch that does not fit into the model's context or the cache.
    """
    found = variants(sized(config, settings), only)
    device = device_of(config)
    bandwidth = bandwidth_of(device)
    rows: list[Row] = []
    loading: list[dict[str, Any]] = []
    for name, engine in engines(found, report):
        measured = Measurement(name, engine, settings)
        loading.append(
            {"weights": name, "load_seconds": engine.loaded.report.seconds, "weight_bytes": engine.loaded.report.bytes_after}
        )
        for phase, size, length in settings.cases:
            rows.append(measured.case(phase, size, length))
            if settings.profile is not None:
                parts = (name, phase, str(size))
                file = trace_file(settings.profile, parts, is_only=len(settings.cases) * len(found) == 1)
                print_operators(" ".join(parts), measured.profile(phase, size, length, file))
        del engine, measured
        bandwidth = max(bandwidth, bandwidth_of(device))
    _print(config.model, settings, bandwidth, rows, loading)


class Measurement:
    """One engine, measured case by case.

    Args:
        weights: what to call it.
        engine: nobody else uses it.
        settings: what to measure.
    """

    def __init__(self, weights: str, engine: Engine, settings: Settings) -> None:
        self._weights, self._engine, self._settings = weights, engine, settings
        self._device: torch.device = engine.loaded.kernels.hardware.device
        self._bytes = Bytes(engine.loaded)
        self._times = engine.scheduler.counters.steps
        self._random = np.random.default_rng(settings.seed)
        self._num_requests = 0

    def case(self, phase: Phase, size: int, length: int) -> Row:
        """Measure one batch size.

        Raises:
            InputError: a prompt that does not fit, or a batch that the cache cannot hold at once.
        """
        settings = self._settings
        time_one = self._prefill if phase == "prefill" else self._decode
        touched = self._touched(phase, size, length)
        for _ in range(settings.num_iters_warmup):
            time_one(size, length, touched)
        timed = [time_one(size, length, touched) for _ in range(settings.num_iters)]
        best = min(timed, key=lambda item: item.seconds)
        per_case = best.seconds if phase == "prefill" else best.seconds / best.steps
        tokens = size * length if phase == "prefill" else size * best.steps
        return Row(
            weights=self._weights,
            phase=phase,
            batch_size=size,
            input_len=length,
            seconds=per_case,
            all_seconds=tuple(item.seconds if phase == "prefill" else item.seconds / item.steps for item in timed),
            tokens_per_second=tokens / best.seconds,
            steps=best.steps,
            weight_bytes=best.moved.weights / best.steps,
            cache_bytes=best.moved.cache / best.steps,
            host_gap_share=best.gap / best.seconds,
            experts=sum(touched) / len(touched) if touched else None,
        )

    def profile(self, phase: Phase, size: int, length: int, file: Path) -> list[Any]:
        """Trace a prefill, or some steps of decoding."""
        if phase == "prefill":
            self._add(size, length, 1)
            return profiled(self._drain, file, self._device)
        self._begin_decode(size, length)
        operators = profiled(lambda: [self._engine.step() for _ in range(_PROFILED_STEPS)], file, self._device)
        self._abort()
        return operators

    def _prefill(self, size: int, length: int, touched: Sequence[float] | None) -> _Timed:
        self._add(size, length, 1)
        return self._timed(None, touched)

    def _decode(self, size: int, length: int, touched: Sequence[float] | None) -> _Timed:
        self._begin_decode(size, length)
        timed = self._timed(self._settings.output_len, touched)
        self._abort()
        return timed

    def _timed(self, num_steps: int | None, touched: Sequence[float] | None) -> _Timed:
        """Time so many steps, or all that there are."""
        done: list[Step | None] = []
        synchronize(self._device)
        start = time.perf_counter()
        while len(done) != num_steps and self._engine.has_work:
            self._engine.step()
            done.append(self._times.last)
        synchronize(self._device)
        seconds = time.perf_counter() - start
        steps = [step for step in done if step is not None]
        moved = sum((self._bytes.of(step, touched) for step in steps), Moved())
        return _Timed(seconds, moved, len(steps), sum(step.gap_seconds for step in steps))

    def _touched(self, phase: Phase, size: int, length: int) -> tuple[int, ...] | None:
        """Experts that routers choose in a step of this case; None where there are no mixtures, or a graph hides them."""
        if not self._bytes.mixtures.num_experts:
            return None
        if phase == "prefill":
            self._add(size, length, 1)
        else:
            self._begin_decode(size, length)
        with watched_routers(self._engine.loaded.model) as choices:
            self._engine.step()
        self._abort()
        return choices.touched

    def _begin_decode(self, size: int, length: int) -> None:
        """Compute prompts until every sequence decodes, and some steps more.

        Raises:
            InputError: the cache cannot hold them all at once.
        """
        scheduler = self._engine.scheduler
        self._add(size, length, _answer_len(self._settings, size, length, scheduler.max_batch_tokens))
        for _ in range(_prefill_steps(size, length, scheduler.max_batch_tokens)):
            self._engine.step()
        decoding = [item for item in scheduler.running if item.num_output_tokens]
        if len(decoding) != size:
            self._abort()
            raise InputError(
                "--batch-size",
                got=size,
                expected=f"at most {len(decoding)}, which run at once",
                remedy="A larger --max-total-tokens, --max-running-requests or --max-mamba-cache-size would hold more.",
            )
        for _ in range(_WARM_STEPS):
            self._engine.step()

    def _add(self, size: int, length: int, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for prompt in random_prompts(size, length, self._engine.vocab_size, self._random):
            self._num_requests += 1
            self._engine.add(self._engine.make_request(str(self._num_requests), prompt, params))

    def _drain(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def _abort(self) -> None:
        scheduler = self._engine.scheduler
        for sequence in [*scheduler.running, *scheduler.waiting]:
            self._engine.abort(sequence.request.request_id)


def _prefill_steps(size: int, length: int, budget: int) -> int:
    """Steps after which the prompts of a batch are computed: the sequences that are through take a token each of the budget."""
    return -(-size * length // max(1, budget - size)) + 1


def _answer_len(settings: Settings, size: int, length: int, budget: int) -> int:
    """Tokens that a sequence has room for: the first that is through with its prompt goes on until the last step is timed."""
    return _prefill_steps(size, length, budget) + _WARM_STEPS + max(settings.output_len, _PROFILED_STEPS) + 1


def _print(model: str, settings: Settings, bandwidth: float, rows: Sequence[Row], loading: Sequence[Mapping[str, Any]]) -> None:
    bf16 = {(row.phase, row.batch_size): row.seconds for row in rows if row.weights == "bf16"}
    header = ["phase, weights, batch x prompt", "tok/s", "ms", "of bf16", "weights MB", "cache MB", "experts", "of copy", "gap"]
    table = [
        [
            f"{row.phase} {row.weights} {row.batch_size} x {row.input_len}",
            f"{row.tokens_per_second:,.1f}",
            f"{row.seconds * 1e3:.2f}",
            f"{bf16[row.phase, row.batch_size] / row.seconds:.2f}" if (row.phase, row.batch_size) in bf16 else "-",
            f"{row.weight_bytes / 1e6:,.1f}",
            f"{row.cache_bytes / 1e6:,.1f}",
            "-" if row.experts is None else f"{row.experts:.0f}",
            f"{row.limit_seconds(bandwidth) / row.seconds:.2f}",
            f"{row.host_gap_share:.1%}",
        ]
        for row in sorted(rows, key=lambda row: (row.phase, row.batch_size))
    ]
    result = {
        "benchmark": "latency",
        "model": model,
        "settings": asdict(settings) | {"profile": settings.profile and str(settings.profile)},
        "copy_bytes_per_second": bandwidth,
        "loading": list(loading),
        "rows": [
            asdict(row)
            | {
                "limit_seconds": row.limit_seconds(bandwidth),
                "limit_share": row.limit_seconds(bandwidth) / row.seconds,
            }
            for row in rows
        ],
    }
    print_report(f"latency {model}, copy {bandwidth / 1e9:,.1f} GB/s", header, table, result)
