"""Many requests on one engine: lengths, arrivals, figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from eightfold.benchmarks import throughput
from eightfold.benchmarks.throughput import Settings, measure, run
from eightfold.benchmarks.traffic import CONVERSATIONS, Fixed, Mix
from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.errors import InputError
from eightfold.types import Batch, StepResult
from tests.models.checkpoints import case, save_config

SHORT = Mix(Fixed(9), Fixed(4))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "bandwidth_of", lambda device: 1e9)


def config(folder: Path, name: str = "llama-gqa", **options: Any) -> EngineConfig:
    values: dict[str, Any] = {"max_total_tokens": 1024, "disable_prefix_cache": True} | options
    return EngineConfig(model=str(save_config(case(name), folder)), load_format="dummy", **values)


def clocked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every step takes 10 ms of a clock that sleeping moves too; returns the sizes of batches."""
    now, sizes = [0.0], []
    compute = engine.runner.run

    def run_slowly(batch: Batch) -> StepResult:
        sizes.append(len(batch.chunks))
        now[0] += 0.010
        return compute(batch)

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(engine.runner, "run", run_slowly)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    return sizes


def test_all_at_once_is_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(config(tmp_path))
    sizes = clocked(engine, monkeypatch)
    done = measure(engine, Settings(num_prompts=5, mix=SHORT, num_warmups=0))
    assert sizes == [5] * 4
    assert done.steps == 4
    assert done.duration == pytest.approx(0.040)
    assert done.step_seconds == pytest.approx(0.040)
    for answer in done.answers:
        assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (9, 4, "length")
        assert answer.ttft == pytest.approx(0.010)
        assert answer.e2el == pytest.approx(0.040)
        assert answer.gaps == pytest.approx([0.010] * 3)


def test_arrivals_are_a_poisson_process_and_waiting_for_a_step_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.load(config(tmp_path))
    sizes = clocked(engine, monkeypatch)
    rate = 50.0
    done = measure(engine, Settings(num_prompts=40, mix=SHORT, num_warmups=0, request_rate=rate))
    assert 0.5 < done.duration / (40 / rate) < 1.8
    assert max(sizes) < 12
    assert done.gap_seconds == pytest.approx(0)  # a pause without work is no gap
    for answer in done.answers:
        assert answer.ttft + 1e-9 >= 0.010
        assert answer.ttft < 0.021
    again = measure(engine, Settings(num_prompts=40, mix=SHORT, num_warmups=0, request_rate=rate))
    assert [item.sent - again.start for item in again.answers] == pytest.approx([a.sent - done.start for a in done.answers])


def test_lengths_are_cut_to_the_context(tmp_path: Path) -> None:
    engine = Engine.load(config(tmp_path))
    done = measure(engine, Settings(num_prompts=12, mix=CONVERSATIONS, num_warmups=2))
    assert len(done.answers) == 12
    assert all(answer.prompt_tokens + answer.completion_tokens <= 128 for answer in done.answers)
    assert len({answer.prompt_tokens for answer in done.answers}) > 3
    assert done.moved.total > 0


@pytest.mark.usefixtures("quick")
def test_a_table_with_bf16_beside_mxfp8_and_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    run(config(tmp_path / "model", "mixtral"), Settings(num_prompts=3, mix=SHORT, profile=trace))
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert (result["benchmark"], result["settings"]["request_rate"]) == ("throughput", "inf")
    bf16, mxfp8 = result["rows"]
    assert (bf16["weights"], mxfp8["weights"]) == ("bf16", "mxfp8")
    assert bf16["total_output_tokens"] == mxfp8["total_output_tokens"] == 12
    assert mxfp8["weight_bytes_per_step"] < 0.7 * bf16["weight_bytes_per_step"]
    assert mxfp8["limit_share"] == mxfp8["bytes_per_second"] / 1e9
    assert mxfp8["cache_bytes_per_step"] == bf16["cache_bytes_per_step"]
    assert (tmp_path / "trace-bf16.json").is_file()
    run(config(tmp_path / "model", "mixtral"), Settings(num_prompts=3, mix=SHORT, request_rate=1000.0), only="mxfp8")
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["settings"]["request_rate"] == 1000.0
    assert lines[-2].split()[2] == "-"  # nothing to compare with


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_prompts": 0}, "--num-prompts: got 0"),
        ({"num_warmups": -1}, "--num-warmups: got -1"),
        ({"request_rate": 0.0}, "--request-rate: got 0.0"),
        ({"request_rate": math.nan}, "--request-rate: got nan"),
        ({"profile": Path("/nowhere/at/all/a.json")}, "--profile: got /nowhere"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**values)
