"""The benchmark of the CPU's products, in its shortest run."""

from __future__ import annotations

import json

import pytest
import torch

from eightfold.benchmarks import cpu
from eightfold.kernels import native
from eightfold.kernels.cpu import CpuLinear, CpuWeight

pytestmark = pytest.mark.skipif(native.status().library is None, reason=native.status().detail)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LAYERS", (("down_proj", 64, 96, 2, "mxfp8"), ("lm_head", 128, 64, 1, "bfloat16")))


def test_a_table_with_the_baseline_beside_ours_and_one_json_line_last(capsys: pytest.CaptureFixture[str]) -> None:
    cpu.main(["--tokens", "1", "4", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    rows = result["rows"]
    assert {row["layer"] for row in rows} == {"down_proj", "lm_head"}
    assert {row["tokens"] for row in rows} == {1, 4}
    assert all(row["ours_us"] > 0 and row["torch_fp32_us"] > 0 and row["torch_bf16_us"] > 0 for row in rows)


def test_a_wrong_product_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CpuLinear.run

    def wrong(self: CpuLinear, x: torch.Tensor, prepared: CpuWeight) -> torch.Tensor:
        return original(self, x, prepared) * 1.02

    monkeypatch.setattr(CpuLinear, "run", wrong)
    with pytest.raises(SystemExit):
        cpu.main(["--tokens", "1", "--rounds", "1"])
