"""Kernel files without triton: importable, and a sentence when launched."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TRITON = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch
from eightfold.kernels import gemm, jit
from eightfold.kernels.operations import LinearSpec
from eightfold.kernels.registry import Hardware
from eightfold.kernels.selection import LINEAR
gpu = Hardware(torch.device("cuda"), "a GPU", (9, 0), frozenset(), 1 << 34, 8)
spec = LinearSpec("layer", 64, 64, "mxfp8", torch.bfloat16)
print([backend.declines(spec, gpu) for backend in LINEAR["cuda"] if backend.name in ("fold", "dequant", "reference")])
try:
    gemm.fold_gemm_kernel[(1,)]()
except RuntimeError as error:
    print(error)
"""


def test_without_triton_backends_decline_and_kernels_say_why() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['triton is not installed', 'triton is not installed', None]",
        "kernel fold_gemm_kernel: triton is not installed",
    ]
