"""The compiled library: how it is found, its threads, and its kernels for the processors that are not this one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eightfold.kernels import native

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "eightfold" / "kernels" / "csrc"
LIBRARY = native.status().library
needs_library = pytest.mark.skipif(LIBRARY is None, reason=native.status().detail)


def test_a_missing_library_is_a_sentence() -> None:
    """In a process of its own, where the module cannot be imported."""
    program = (
        "import sys; sys.modules['eightfold.kernels._native'] = None\n"
        "from eightfold.kernels import native; print(native.status().library, native.status().detail)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=HERE.parents[1])
    assert out.stdout.startswith("None the native library was not built")


@needs_library
def test_threads_are_those_of_torch() -> None:
    """The runtime that holds GOMP_parallel counts the threads that torch sets, and there is only one of its kind."""
    if sys.platform != "linux":
        pytest.skip("looks into /proc")
    assert "torch's OpenMP threads" in native.status().detail
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    counted = torch_cpu.omp_get_max_threads()
    torch.set_num_threads(before)
    assert counted == before + 1
    program = (
        "from eightfold.kernels import native; native.status()\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'libomp' in line}))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=HERE.parents[1])
    assert int(out.stdout) == 1


@needs_library
def test_arguments_are_checked() -> None:
    assert LIBRARY is not None
    with pytest.raises(TypeError, match="expected 6 arguments, got 1"):
        LIBRARY.silu_and_mul(0)
    with pytest.raises(TypeError):
        LIBRARY.any_equal("text", 0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no instruction set 'mmx'"):
        LIBRARY.use("mmx")


@needs_library
def test_any_equal() -> None:
    assert LIBRARY is not None
    data = torch.zeros(10_000, dtype=torch.uint8)
    assert not LIBRARY.any_equal(data.data_ptr(), data.numel(), 0x7F, 0x7F)
    data[9_999] = 0xFF
    assert LIBRARY.any_equal(data.data_ptr(), data.numel(), 0x7F, 0x7F)
    assert not LIBRARY.any_equal(data.data_ptr(), data.numel() - 1, 0x7F, 0x7F)


def test_neon_under_an_emulator(tmp_path: Path) -> None:
    """Every kernel as AArch64 code against the scalar one."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user")
    sources = [HERE / "native_driver.cpp", *(SOURCES / name for name in ("isa_neon.cpp", "isa_scalar.cpp", "parallel.cpp"))]
    binary = tmp_path / "driver"
    flags = ["-std=c++17", "-O2", "-static", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(binary)], check=True)
    out = subprocess.run([emulator, str(binary)], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout
    assert out.stdout.endswith("all equal\n")
