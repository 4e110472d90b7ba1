"""Triton, where it is installed, behind types.

Kernel files import `tl` from here and not from triton, so that they can be imported, and their backends asked, where there is
no triton: it has wheels for Linux alone. There, a kernel raises when it is launched, and a backend declines with `MISSING`.

A condition on one number joins a block's mask as `tl.where(condition, mask, False)`. On a GPU `mask & condition` is the same,
but triton's interpreter spreads a comparison of numbers over a block as integers, which from 3.9 on it refuses as a mask.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

_FOUND = importlib.util.find_spec("triton") is not None

MISSING: str | None = None if _FOUND else "triton is not installed"

triton: Any = importlib.import_module("triton") if _FOUND else None
tl: Any = importlib.import_module("triton.language") if _FOUND else None
_cuda: Any = importlib.import_module("triton.language.extra.cuda") if _FOUND else None
TensorDescriptor: Any = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor if _FOUND else None

# The two halves of programmatic dependent launch: let the next kernel start; wait until the previous one has ended.
launch_dependents: Any = _cuda.gdc_launch_dependents if _FOUND else None
wait_for_predecessor: Any = _cuda.gdc_wait if _FOUND else None


class Kernel(Protocol):
    """A jitted function: launched as `kernel[grid](...)` from Python, called as `kernel(...)` from another kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...

    def __call__(self, *args: Any) -> Any:
        """Inside a kernel only."""


def launch_options(*, overlap: bool = False) -> dict[str, bool]:
    """What every launch says beside its own sizes.

    Products and sums may become one instruction: triton's default changes with its version, and the figures and tests are of
    this one. With `overlap` a kernel starts before its predecessor ends; elsewhere triton may not know the word.
    """
    return {"enable_fp_fusion": True, "launch_pdl": True} if overlap else {"enable_fp_fusion": True}


def kernel(*not_specialized: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Jit a function.

    Args:
        not_specialized: arguments that vary from call to call, for whose value (1, a multiple of 16) nothing is recompiled.
    """

    def wrap(function: Callable[..., Any]) -> Kernel:
        if triton is None:
            return _Missing(function.__name__)
        jitted: Kernel = triton.jit(function, do_not_specialize=list(not_specialized))
        return jitted

    return wrap


class _Missing:
    """What a kernel is where there is no triton."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        raise RuntimeError(f"kernel {self.name}: {MISSING}")

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError(f"kernel {self.name}, called with {len(args)} arguments: {MISSING}")
