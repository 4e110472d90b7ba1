"""What this machine is: the only place that asks."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from eightfold.errors import InputError
from eightfold.kernels import native
from eightfold.kernels.registry import Hardware

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
# What each instruction set of the native kernels implies, in the words of `Hardware.features`.
_FEATURES = {
    "avx512_bf16": frozenset({"avx512_bf16"}),
    "avx512": frozenset({"avx512"}),
    "avx2": frozenset({"avx2", "f16c"}),
    "neon": frozenset({"neon"}),
    "scalar": frozenset[str](),
}
# The same words by the flags of /proc/cpuinfo.
_FLAGS = {"avx2": "avx2", "f16c": "f16c", "avx512f": "avx512", "avx512_bf16": "avx512_bf16", "asimd": "neon"}


def detect(device: str = "auto") -> Hardware:
    """Describe the device that a model will run on.

    Args:
        device: "auto" (a GPU where torch sees one), "cpu", "cuda" or "cuda:N".

    Raises:
        InputError: an unknown device, or a GPU that torch does not see.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if device == "cpu":
        return _cpu()
    if kind != "cuda" or not (index.isdecimal() or device == "cuda"):
        raise InputError("device", got=device, expected='"auto", "cpu", "cuda" or "cuda:N"')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(index or 0)
    if number >= count:
        raise InputError("device", got=device, expected=f"one of the {count} GPUs that torch sees, or cpu")
    return _cuda(number)


def _cuda(index: int) -> Hardware:
    properties = torch.cuda.get_device_properties(index)
    # AMD's GPUs have the device type "cuda" too, and numbers that are no compute capability: "gfx950:sramecc+:xnack-".
    amd = properties.gcnArchName.partition(":")[0] if torch.version.hip is not None else ""
    return Hardware(
        device=torch.device("cuda", index),
        name=properties.name,
        capability=None if amd else (properties.major, properties.minor),
        features=frozenset({amd} if amd else ()),
        memory_bytes=properties.total_memory,
        num_threads=torch.get_num_threads(),
    )


def _cpu() -> Hardware:
    features = _cpu_features()
    best = next((name for name in ("avx512_bf16", "avx512", "avx2", "neon") if name in features), "no vector instructions")
    return Hardware(
        device=torch.device("cpu"),
        name=f"{_cpu_name()} ({best})",
        capability=None,
        features=features,
        memory_bytes=_memory_bytes(),
        num_threads=torch.get_num_threads(),
    )


def _cpu_features() -> frozenset[str]:
    """Asks the native library; without it, the kernel's list of flags; without that, torch."""
    library = native.status().library
    if library is not None:
        return frozenset().union(*(_FEATURES[name] for name in library.available()))
    flags = {word for key, value in _cpuinfo() if key in ("flags", "Features") for word in value.split()}
    if flags:
        return frozenset(word for flag, word in _FLAGS.items() if flag in flags)
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX2": _FEATURES["avx2"], "AVX512": _FEATURES["avx2"] | _FEATURES["avx512"]}.get(capability, frozenset())


def _cpu_name() -> str:
    return next((value for key, value in _cpuinfo() if key == "model name"), os.uname().machine)


def _cpuinfo() -> list[tuple[str, str]]:
    """The pairs of /proc/cpuinfo's first processor; none where there is no such file."""
    if not _CPUINFO.exists():
        return []
    first = _CPUINFO.read_text(errors="replace").split("\n\n", maxsplit=1)[0]
    lines = (line.partition(":") for line in first.splitlines())
    return [(key.strip(), value.strip()) for key, _, value in lines]


def _memory_bytes() -> int:
    """The machine's memory, or the container's share of it where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return min(physical, int(limit)) if limit.isdecimal() else physical
