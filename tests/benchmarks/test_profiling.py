"""Traces and the operators that take most."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from eightfold.benchmarks.profiling import MOST, marked_layers, operator_rows, profiled
from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.layers.linear import Linear, LowLatencyLinear
from eightfold.types import SamplingParams
from tests.models.checkpoints import case, save_config


def test_a_trace_and_the_largest_operators_with_layers_by_name(tmp_path: Path) -> None:
    folder = save_config(case("nemotron-latent"), tmp_path / "model")
    engine = Engine.load(EngineConfig(model=str(folder), load_format="dummy", quantization="mxfp8", max_total_tokens=256))
    engine.add(engine.make_request("r", [5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)))
    operators = profiled(lambda: [engine.step() for _ in range(3)], tmp_path / "trace.json", torch.device("cpu"))
    assert len(operators) == MOST
    assert [item.seconds for item in operators] == sorted((item.seconds for item in operators), reverse=True)
    assert 0 < sum(item.share for item in operators) <= 1
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"layer: Linear mixer.in_proj", "layer: LowLatencyLinear mixer.fc1_latent_proj", "layer: Mamba2 mixer"} <= names
    assert "layer: Linear mixer.fc1_latent_proj" not in names
    assert len(operator_rows(operators)) == MOST


def test_marks_end_with_the_profile() -> None:
    before = Linear.__call__, LowLatencyLinear.__call__
    with marked_layers():
        assert Linear.__call__ is not before[0]
    assert (Linear.__call__, LowLatencyLinear.__call__) == before
