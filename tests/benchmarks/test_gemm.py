"""The benchmark of dense products, as far as it runs without a GPU, and its gate with one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from eightfold.benchmarks.gemm import check, make_weight
from eightfold.kernels.cuda import FoldLinear


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "eightfold.benchmarks.gemm"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "this benchmark needs a CUDA GPU\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = FoldLinear().prepare(make_weight(256, 256, 0), None)
    x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    check(x, prepared)
    run = FoldLinear.run
    monkeypatch.setattr(FoldLinear, "run", lambda self, x, prepared: run(self, x, prepared) * 1.02)
    with pytest.raises(SystemExit, match="error"):
        check(x, replace(prepared))
