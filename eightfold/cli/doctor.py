"""`eightfold doctor`: what this machine has, and which backends it can run."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Annotated, Any

import typer

from eightfold._version import __version__
from eightfold.cli.output import megabytes, table, write
from eightfold.errors import InputError

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Show versions, devices, the native library, and each backend: available, or why not."""
    facts = examine()
    if as_json:
        write(json.dumps(facts))
        return
    write(table(list(facts["versions"].items())))
    write(f"\nnative library: {facts['native']}")
    for device in facts["devices"]:
        features = ", ".join(device["features"]) or "none"
        write(f"\n{device['device']}: {device['name']}, {megabytes(device['memory_bytes'])}, {device['num_threads']} threads")
        write(f"features: {features}" if device["capability"] is None else f"compute capability: {device['capability']}")
        rows = [(item["operation"], item["backend"], item["declined"] or "available") for item in device["backends"]]
        write(table([("operation", "backend", "state"), *rows]))


def examine() -> dict[str, Any]:
    """The facts that `doctor` prints."""
    from eightfold.kernels import native

    return {
        "versions": {"eightfold": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "native": native.status().detail,
        "devices": [_device(hardware) for hardware in _all_hardware()],
    }


def _all_hardware() -> Iterator[Any]:
    """The CPU, and each GPU until there is no further one."""
    from eightfold.kernels.hardware import detect

    yield detect("cpu")
    for index in count():
        try:
            yield detect(f"cuda:{index}")
        except InputError:
            return


def _device(hardware: Any) -> dict[str, Any]:
    return {
        "device": str(hardware.device),
        "name": hardware.name,
        "capability": None if hardware.capability is None else ".".join(map(str, hardware.capability)),
        "features": sorted(hardware.features),
        "memory_bytes": hardware.memory_bytes,
        "num_threads": hardware.num_threads,
        "backends": _backends(hardware),
    }


def _backends(hardware: Any) -> list[dict[str, Any]]:
    """Every backend, asked about a layer of ordinary size in the dtype that this device would choose."""
    import torch

    from eightfold.config import default_dtype
    from eightfold.kernels.operations import AttentionSpec, LinearSpec, MambaSpec, MoeSpec
    from eightfold.kernels.selection import ATTENTION, FUSED, LINEAR, LOW_LATENCY, MAMBA, MOE

    kind = hardware.device.type
    dtype = getattr(torch, default_dtype(kind)[0])
    quantized = LinearSpec("a layer", 4096, 4096, "mxfp8", dtype)
    kept = LinearSpec("a layer", 4096, 4096, "bfloat16", dtype)
    attention = AttentionSpec(32, 8, 128, 128**-0.5, None, dtype)
    gated = MoeSpec("experts", 128, 8, 2048, 768, True, "silu", "mxfp8", dtype)
    plain = MoeSpec("experts", 128, 6, 2688, 1856, False, "relu2", "mxfp8", dtype)
    mamba = MambaSpec("a layer", 64, 64, 128, 8, 4, (0.0, math.inf), dtype, torch.float32)
    questions: tuple[tuple[str, Any, Any], ...] = (
        ("linear mxfp8", LINEAR, quantized),
        ("linear bfloat16", LINEAR, kept),
        ("gated experts mxfp8", MOE, gated),
        ("experts mxfp8", MOE, plain),
        ("low latency mxfp8", LOW_LATENCY, quantized),
        ("attention", ATTENTION, attention),
        ("mamba2", MAMBA, mamba),
        ("fused", FUSED, dtype),
    )
    return [
        {"operation": operation, "backend": backend.name, "declined": backend.declines(spec, hardware)}
        for operation, backends, spec in questions
        for backend in backends.get(kind, ())
    ] + [
        {"operation": operation, "backend": backend.name, "declined": f"it is for {other}"}
        for operation, backends, _ in questions
        for other, candidates in backends.items()
        for backend in candidates
        if other != kind and backend.name not in {own.name for own in backends.get(kind, ())}
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
