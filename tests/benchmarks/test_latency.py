"""Prefill and decode by batch, on an engine whose time is a clock of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eightfold.benchmarks import latency
from eightfold.benchmarks.latency import Measurement, Settings, run, sized
from eightfold.benchmarks.offline import variants
from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.errors import InputError
from eightfold.types import Batch, StepResult
from tests.models.checkpoints import case, save_config


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((1e9, 5e9, 2e9))  # the best counts
    monkeypatch.setattr(latency, "bandwidth_of", lambda device: next(found))


def config(folder: Path, name: str = "llama-gqa", **options: Any) -> EngineConfig:
    return EngineConfig(model=str(save_config(case(name), folder)), load_format="dummy", **options)


class Clock:
    """A clock that stands still but for 10 ms a step and 1 ms a token; every step is kept."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.batches: list[Batch] = []
        compute = engine.runner.run

        def run_slowly(batch: Batch) -> StepResult:
            self.batches.append(batch)
            self.now += 0.010 + 0.001 * batch.num_tokens
            return compute(batch)

        monkeypatch.setattr(engine.runner, "run", run_slowly)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


@pytest.mark.parametrize(("size", "length", "chunk"), [(1, 20, 64), (4, 20, 64), (7, 33, 16), (8, 9, 4)])
def test_the_times_are_those_of_whole_prefills_and_of_pure_decodes(
    size: int, length: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(batch_sizes=(size,), input_len=length, output_len=5, num_iters=2)
    engine = Engine.load(sized(config(tmp_path, chunked_prefill_size=chunk), settings))
    clock = Clock(engine, monkeypatch)
    measured = Measurement("bf16", engine, settings)
    prefill = measured.case("prefill", size, length)
    steps = -(-size * length // chunk)
    assert prefill.steps == steps
    assert prefill.seconds == pytest.approx(0.010 * steps + 0.001 * size * length)
    assert prefill.tokens_per_second == pytest.approx(size * length / prefill.seconds)
    assert prefill.all_seconds == pytest.approx([prefill.seconds] * 2)
    decode = measured.case("decode", size, length)
    assert decode.steps == 5
    assert decode.seconds == pytest.approx(0.010 + 0.001 * size)
    assert decode.tokens_per_second == pytest.approx(size / decode.seconds)
    timed = clock.batches[-5:]
    assert all(len(batch.chunks) == batch.num_tokens == size for batch in timed)
    assert not engine.has_work
    assert engine.scheduler.manager.num_free_blocks == engine.scheduler.manager.num_blocks
    assert decode.limit_seconds(1e9) == pytest.approx((decode.weight_bytes + decode.cache_bytes) / 1e9)
    assert prefill.limit_seconds(1e9) == pytest.approx(steps * (prefill.weight_bytes + prefill.cache_bytes) / 1e9)


def test_a_batch_that_cannot_run_at_once_is_refused(tmp_path: Path) -> None:
    settings = Settings(batch_sizes=(4,), input_len=20)
    engine = Engine.load(sized(config(tmp_path, max_running_requests=3), settings))
    with pytest.raises(InputError, match=r"--batch-size: got 4; expected at most 3, which run at once\. A larger"):
        Measurement("bf16", engine, settings).case("decode", 4, 20)
    assert not engine.has_work


@pytest.mark.usefixtures("quick")
def test_a_table_with_bf16_beside_mxfp8_and_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(
        (1, 3), 8, 4, prefill_batch_sizes=(2,), prefill_input_len=30, num_iters=1, profile=tmp_path / "trace.json"
    )
    given = config(tmp_path / "model", "nemotron-mixed", quantization="mxfp8")
    run(given, settings)
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert result["benchmark"] == "latency"
    rows = {(row["weights"], row["phase"], row["batch_size"]): row for row in result["rows"]}
    cases = [("prefill", 2), ("decode", 1), ("decode", 3)]
    assert rows.keys() == {(weights, *item) for weights in ("bf16", "mxfp8") for item in cases}
    assert rows["bf16", "prefill", 2]["input_len"] == 30
    for phase, size in cases:
        assert rows["mxfp8", phase, size]["weight_bytes"] < rows["bf16", phase, size]["weight_bytes"]
        assert 3 <= rows["mxfp8", phase, size]["experts"] <= 8
        assert rows["mxfp8", phase, size]["limit_share"] > 0
    row = rows["mxfp8", "decode", 3]
    assert result["copy_bytes_per_second"] == 5e9
    assert row["limit_seconds"] == pytest.approx((row["weight_bytes"] + row["cache_bytes"]) / 5e9)
    assert rows["mxfp8", "decode", 1]["experts"] == 3  # one token
    assert sum(line.endswith("operators that take most") for line in out) == 6
    assert (tmp_path / "trace-mxfp8-decode-3.json").is_file()
    assert [line.split()[:2] for line in out if line.startswith("decode ")] == [["decode", "bf16"], ["decode", "mxfp8"]] * 2
    # Both engines had the same sizes.
    assert len({item.config.max_total_tokens for item in variants(sized(given, settings))}) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_len": 0}, "--input-len: got 0"),
        ({"num_iters": 0}, "--num-iters: got 0"),
        ({"num_iters_warmup": -1}, "--num-iters-warmup: got -1"),
        ({"batch_sizes": (0,)}, "--batch-size: got 0"),
        ({"profile": Path("/nowhere/at/all/a.json")}, "--profile: got /nowhere"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**values)


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    settings = Settings(batch_sizes=(1,), input_len=500)
    engine = Engine.load(sized(config(tmp_path), settings))
    with pytest.raises(InputError, match="500"):
        Measurement("bf16", engine, settings).case("prefill", 1, 500)
