"""`eightfold bench latency` and `throughput` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eightfold.benchmarks import latency, throughput
from eightfold.cli import main
from tests.models.checkpoints import case, save_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for module in (latency, throughput):
        monkeypatch.setattr(module, "bandwidth_of", lambda device: 1e9)
    return str(save_config(case("llama-gqa"), tmp_path))


def test_latency_takes_flags_of_the_engine_and_its_own(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--load-format", "dummy", "--batch-size", "1,2", "--batch-size", "3", "--input-len", "8", "--output-len", "2"]
    further = ["--num-iters", "1", "--prefill-batch-size", "2", "--prefill-input-len", "20", "--seed", "5", "--page-size", "4"]
    assert main(["bench", "latency", folder, *words, *further]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["settings"]["batch_sizes"] == [1, 2, 3]
    assert (result["settings"]["prefill_batch_sizes"], result["settings"]["seed"]) == ([2], 5)
    assert len(result["rows"]) == 2 * (3 + 1)


def test_throughput_takes_flags_of_the_engine_and_its_own(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--load-format",
        "dummy",
        "--num-prompts",
        "3",
        "--input-len",
        "8",
        "--output-len",
        "2",
        "--max-total-tokens",
        "256",
    ]
    assert main(["bench", "throughput", folder, *words, "--request-rate", "500", "--only", "mxfp8"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["weights"] for row in result["rows"]] == ["mxfp8"]
    assert result["rows"][0]["total_output_tokens"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["latency", "MODEL", "--load-format", "dummy", "--batch-size", "1,x"],
            "--batch-size: got 1,x; expected whole numbers",
        ),
        (["latency", "MODEL", "--load-format", "dummy", "--only", "fp4"], "--only: got fp4; expected bf16 or mxfp8"),
        (["latency", "MODEL"], "model: got "),
        (["latency", "nemotron-3-nano"], "model: got nemotron-3-nano, a configuration without weights"),
        (["throughput", "MODEL", "--load-format", "dummy", "--output-len", "0"], "--output-len: got 0; expected at least 1"),
    ],
)
def test_refusals(words: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *(folder if word == "MODEL" else word for word in words)]) == 2
    assert capsys.readouterr().err.startswith(f"eightfold: {message}")
