"""What holds for all tests: fresh memory is poisoned, and random and property tests are the same in every run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eightfold.hub.resolve import resolve_model
from eightfold.kernels.storage import Arena

# The tests marked `gpu` run where pytest alone is installed beside what the package needs.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill fresh memory with what no right result holds: NaN, or for whole numbers a pattern far from any index."""
    if tensor.is_floating_point():
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapper(*arguments: Any, **options: Any) -> torch.Tensor:
        made = make(*arguments, **options)
        return made if made.is_meta else poison(made)

    return wrapper


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random operands are the same in every run and whatever runs before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test reads without having written it is NaN."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
    monkeypatch.setattr(Arena, "empty", _poisoned(Arena.empty))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the real model, fetched and converted on first use."""
    return resolve_model("smollm2")
