"""Where the time of some steps goes: a Chrome trace, and the operators that take most.

On a GPU an operator is a kernel, by its name. On a CPU the products run in a library of ours that torch does not see, so each
layer's call is marked with its kind and name, and its own time is what no operator of torch inside it took.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from eightfold.layers.attention import Attention
from eightfold.layers.linear import Linear, LowLatencyLinear
from eightfold.layers.mamba2 import Mamba2
from eightfold.layers.module import Module
from eightfold.layers.moe import Experts, Router

_MARKED: tuple[type[Module], ...] = (Linear, LowLatencyLinear, Attention, Mamba2, Experts, Router)
_MARK = "layer: "
_NUMBER = re.compile(r"^.*\blayers\.\d+\.")
MOST = 10
"""Operators that are shown."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One kernel or operator.

    Attributes:
        name: the kernel's, torch's, or the layer's kind and name without its number.
        calls: how often it ran.
        seconds: in all, without what runs inside of it.
        share: of the time of all operators.
    """

    name: str
    calls: int
    seconds: float
    share: float


def profiled(run: Callable[[], object], file: Path, device: torch.device) -> list[Operator]:
    """Run something under torch's profiler.

    Args:
        run: what to look at.
        file: where the Chrome trace goes.
        device: where the work happens.

    Returns:
        The operators that took most time, the largest first.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler, marked_layers():
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(file))
    events: Any = profiler.key_averages()
    taken = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    # On a GPU, marks of layers span kernels and would count them twice.
    wanted = [event for event in events if not (on_gpu and event.key.startswith(_MARK)) and getattr(event, taken) > 0]
    total = sum(getattr(event, taken) for event in wanted) or 1.0
    largest = sorted(wanted, key=lambda event: getattr(event, taken), reverse=True)[:MOST]
    return [
        Operator(event.key.removeprefix(_MARK), event.count, getattr(event, taken) / 1e6, getattr(event, taken) / total)
        for event in largest
    ]


@contextmanager
def marked_layers() -> Iterator[None]:
    """Mark the calls of all layers for the profiler while the `with` lasts."""
    calls = {kind: kind.__dict__["__call__"] for kind in _MARKED if "__call__" in kind.__dict__}
    for kind, call in calls.items():
        setattr(kind, "__call__", _marked(kind, call))  # noqa: B010, as mypy knows that a method is not assigned to
    try:
        yield
    finally:
        for kind, call in calls.items():
            setattr(kind, "__call__", call)  # noqa: B010


def _marked(kind: type[Module], call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(module: Module, *arguments: Any, **options: Any) -> Any:
        if type(module) is not kind:  # a kind that extends this one has marked the call
            return call(module, *arguments, **options)
        name = _NUMBER.sub("", str(getattr(module, "name", "")))
        with record_function(f"{_MARK}{kind.__name__} {name}".rstrip()):
            return call(module, *arguments, **options)

    return wrapper


def operator_rows(operators: list[Operator]) -> list[str]:
    """The operators as lines of text."""
    return [f"{item.share:6.1%}  {item.seconds * 1e3:9.2f} ms  {item.calls:6}  {item.name[:90]}" for item in operators]
