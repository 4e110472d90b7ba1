"""Install torch into the environment that runs this script: a CPU build where there is no NVIDIA GPU.

On Linux x86_64 the package index serves a build with several gigabytes of CUDA libraries, so a CPU build is looked for first:
as a wheel that pip may have at hand, then through uv, which knows where CPU builds are. Elsewhere the usual build is small.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys

CPU_VERSION = "2.13.0"


def has_nvidia_gpu() -> bool:
    """Whether the driver lists a GPU."""
    program = shutil.which("nvidia-smi")
    return program is not None and subprocess.run([program, "-L"], capture_output=True, check=False).returncode == 0


def pip_install(*arguments: str, quiet: bool = False) -> bool:
    """Run pip; whether it succeeded. With `quiet`, a failure says nothing: another way follows."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL if quiet else None).returncode == 0


def install_cpu_build() -> bool:
    """Install a CPU build on Linux x86_64, by the first way that works."""
    if pip_install("--only-binary", "torch", f"torch=={CPU_VERSION}+cpu", quiet=True):
        return True
    if not pip_install("uv", quiet=True):
        return False
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        sys.executable,
        "--torch-backend",
        "cpu",
        "torch",
    ]
    return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    """Install torch unless it is there; the exit status."""
    if importlib.util.find_spec("torch") is not None:
        return 0
    wants_cpu_build = not has_nvidia_gpu() and (sys.platform, platform.machine()) == ("linux", "x86_64")
    if wants_cpu_build and install_cpu_build():
        return 0
    if wants_cpu_build:
        print("No CPU build of torch was found; the usual one follows, which is several gigabytes.", file=sys.stderr)
    return 0 if pip_install("torch") else 1


if __name__ == "__main__":
    sys.exit(main())
