"""The CPU's native kernels, if they were built, and the threads that they run on.

The sources are in `csrc/`. They are compiled when Eightfold is installed, where a C++ compiler is there; a machine without one
gets the reference kernels, and `status()` has the sentence that tells people so.

The kernels bring no threads. torch's own CPU operations run on an OpenMP runtime that comes with torch, and two pools in a
process would fight for the cores, so the kernels are handed the `GOMP_parallel` of that very runtime. It is looked up through
the handle of libtorch_cpu, whose dependencies the lookup covers whatever name a wheel gave them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch

# The numbers of `enum class Type` in csrc/types.h.
TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MXFP8_CODE = 3


class Library(Protocol):
    """The functions of the compiled module. Tensors go by address; csrc/kernels.h names the arguments in their order."""

    def linear(self, *args: int) -> None:
        """Compute y = x Wᵀ + b; `LinearArgs`."""

    def attention(self, *args: float) -> None:
        """Attend over the paged cache; `AttentionArgs`."""

    def norm(self, *args: float) -> None:
        """RMS norm, with or without a residual; `NormArgs`."""

    def rotary(self, *args: int) -> None:
        """Rotate queries and keys in place; `RotaryArgs`."""

    def silu_and_mul(self, *args: int) -> None:
        """Compute silu(gate) * up; `SiluArgs`."""

    def write_kv(self, *args: int) -> None:
        """Store keys and values at their slots; `WriteArgs`."""

    def any_equal(self, data: int, count: int, mask: int, value: int, /) -> bool:
        """Whether any of `count` bytes at `data` has `byte & mask == value`."""

    def available(self) -> list[str]:
        """Name the instruction sets that this machine and this build have, best first."""

    def current(self) -> str:
        """Name the instruction set in use."""

    def use(self, name: str, /) -> None:
        """Use an instruction set of `available()` from now on, in all threads; for tests and benchmarks."""

    def use_openmp(self, gomp_parallel: int, /) -> None:
        """Adopt the OpenMP runtime whose `GOMP_parallel` is at this address; 0 returns to one thread."""


@dataclass(frozen=True, slots=True)
class Status:
    """What there is of the native kernels.

    Attributes:
        library: the compiled module, or None.
        detail: why there is none; else the instruction set and the threads, for `doctor` and the log.
    """

    library: Library | None
    detail: str


@functools.cache
def status() -> Status:
    """Load the library, once, and give it torch's threads."""
    try:
        library = cast("Library", import_module("eightfold.kernels._native"))
    except ModuleNotFoundError:
        return Status(None, "the native library was not built: no C++ compiler when Eightfold was installed")
    except ImportError as error:
        return Status(None, f"the native library does not load: {error}")
    address = _gomp_parallel()
    if address is not None:
        library.use_openmp(address)
    threads = "one thread, because torch carries no OpenMP runtime" if address is None else "torch's OpenMP threads"
    return Status(library, f"{library.current()}, {threads}")


def _gomp_parallel() -> int | None:
    """Address of `GOMP_parallel` in the runtime that torch uses; None where torch has none."""
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))  # loaded already: this is the same handle
        function = torch_cpu.GOMP_parallel
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value
