"""`eightfold demo`: a real model answers one question, and says what was done to it."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from eightfold.cli.inspect import describe
from eightfold.cli.output import megabytes, progress_bars, table, write

if TYPE_CHECKING:
    from eightfold.inspection import BackendUse
    from eightfold.models.loader import LoadReport

QUESTION = "What is the capital of France?"
# With the system message that its template inserts by itself, the model's first token is nearly a tie even in bf16 ("The" leads
# by 0.1 nats), and rounding the weights to 8 bits decides it the other way. Told this much, it leads by more than one nat.
SYSTEM = "Answer in one sentence."


def demo(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What to load; it needs a chat template.")] = "smollm2",
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
) -> None:
    """Fetch a small model, quantize it to MXFP8 while it loads, and ask it a question."""
    from eightfold.config import EngineConfig
    from eightfold.engine.engine import Engine
    from eightfold.hub.resolve import resolve_model
    from eightfold.inspection import bound_backends
    from eightfold.llm import LLM
    from eightfold.memory import PeakMemory
    from eightfold.text import Tokenizer
    from eightfold.types import SamplingParams

    with progress_bars() as report:
        path = resolve_model(model, report=report)
        # What the tokenizer frees again could hold weights, and the peak would come out too small: it is loaded afterwards.
        with PeakMemory() as peak:
            engine = Engine.load(EngineConfig(model=str(path), quantization="mxfp8"), report=report)
        llm = LLM.from_engine(engine, Tokenizer.load(path))
    write(f"{question}\n")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    started = time.perf_counter()
    arrivals: list[float] = []
    for event in llm.stream(messages, SamplingParams(temperature=0.0)):
        arrivals.extend([time.perf_counter()] * len(event.token_ids))
        write(event.text, end="")
    write("\n")
    loaded = engine.loaded
    rows = _loading(loaded.report, peak.growth) + _backends(bound_backends(loaded.model))
    rows.append(("time to first token", f"{arrivals[0] - started:.2f} s"))
    if len(arrivals) > 1:
        rows.append(("tokens a second", f"{(len(arrivals) - 1) / (arrivals[-1] - arrivals[0]):.1f} after the first"))
    write(table(rows))


def _loading(report: LoadReport, peak_bytes: int | None) -> list[tuple[str, str]]:
    kept = Counter(item.decision.reason for item in report.tensors if not item.decision.quantized)
    quantized = sum(item.decision.quantized for item in report.tensors)
    return [
        ("tensors quantized", f"{quantized}"),
        ("tensors kept", f"{kept.total()}: " + ", ".join(f"{count} {reason}" for reason, count in kept.items())),
        ("bytes in the files", megabytes(report.bytes_before)),
        ("bytes in memory", megabytes(report.bytes_after)),
        ("peak while loading", megabytes(peak_bytes)),
    ]


def _backends(uses: tuple[BackendUse, ...]) -> list[tuple[str, str]]:
    return [("backend" if index == 0 else "", text) for index, use in enumerate(uses) for text in describe(use).split("\n")]
