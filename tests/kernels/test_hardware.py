"""What detect() says of this machine, and of others as their files would describe them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eightfold.errors import InputError
from eightfold.kernels import hardware, jit, native
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.selection import LINEAR


def test_the_cpu() -> None:
    found = hardware.detect("cpu")
    assert found.device == torch.device("cpu")
    assert found.capability is None
    assert found.num_threads == torch.get_num_threads()
    assert found.memory_bytes > 1 << 28
    assert found.features <= {"avx2", "f16c", "avx512", "avx512_bf16", "neon"}
    assert found.name.endswith(")")


def test_auto_takes_a_gpu_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.detect().device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=1 << 37)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert hardware.detect().device == torch.device("cuda", 0)
    found = hardware.detect("cuda:1")
    assert (found.device, found.capability, found.name) == (torch.device("cuda", 1), (9, 0), "NVIDIA H200")
    with pytest.raises(InputError, match=r"cuda:2.*one of the 2 GPUs"):
        hardware.detect("cuda:2")


def test_a_gpu_of_amd_has_an_architecture_and_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(
        name="AMD Instinct MI355X", major=9, minor=5, total_memory=1 << 38, gcnArchName="gfx950:sramecc+:xnack-"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = hardware.detect()
    assert (found.device.type, found.capability, found.features) == ("cuda", None, frozenset({"gfx950"}))
    spec = LinearSpec("layer", 64, 64, "mxfp8", torch.bfloat16)
    accepted = [backend.name for backend in LINEAR["cuda"] if backend.declines(spec, found) is None]
    assert accepted == [*(["triton"] if jit.MISSING is None else []), "reference"]


@pytest.mark.parametrize("device", ["tpu", "cuda:", "cuda:x", "cpu:0", "cudax"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(InputError, match='"cuda:N"'):
        hardware.detect(device)


def test_a_gpu_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="0 GPUs"):
        hardware.detect("cuda")


def test_without_the_library_the_flags_of_the_kernel_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "status", lambda: native.Status(None, "not built"))
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "_CPUINFO", cpuinfo)
    cpuinfo.write_text("model name\t: A CPU\nflags\t\t: fpu avx2 f16c avx512f\n\nmodel name\t: Another\nflags: avx512_bf16\n")
    found = hardware.detect("cpu")
    assert found.features == {"avx2", "f16c", "avx512"}
    assert found.name == "A CPU (avx512)"
    cpuinfo.write_text("Features\t: fp asimd\n")
    assert hardware.detect("cpu").features == {"neon"}
    cpuinfo.unlink()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert hardware.detect("cpu").features == {"avx2", "f16c"}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert hardware.detect("cpu").name.endswith("(no vector instructions)")


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "_CGROUP_LIMIT", limit)
    whole = hardware.detect("cpu").memory_bytes
    limit.write_text("max\n")
    assert hardware.detect("cpu").memory_bytes == whole
    limit.write_text("1048576\n")
    assert hardware.detect("cpu").memory_bytes == 1048576
