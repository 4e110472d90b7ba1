"""Bytes of a step, counted by hand for a small model, and experts as routers choose them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eightfold.benchmarks.moved import Bytes, Mixtures, Moved, watched_routers
from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.engine.metrics import Step
from eightfold.layers.moe import MoE
from eightfold.types import SamplingParams
from tests.models.checkpoints import VOCAB_SIZE, case, save_config


def engine_of(name: str, folder: Path, **options: Any) -> Engine:
    values: dict[str, Any] = {"max_total_tokens": 256, "max_running_requests": 2, "disable_prefix_cache": True}
    return Engine.load(EngineConfig(model=str(save_config(case(name), folder)), load_format="dummy", **(values | options)))


STEP = Step("decode", num_sequences=2, num_tokens=2, context_tokens=30, seconds=1.0, gap_seconds=0.0)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-tied"])
def test_a_dense_model_reads_all_but_the_rows_of_its_embedding(name: str, tmp_path: Path) -> None:
    engine = engine_of(name, tmp_path)
    found = Bytes(engine.loaded).of(STEP)
    table = 2 * 64 * VOCAB_SIZE
    weights = engine.loaded.report.bytes_after
    # bf16 rows of 64; 3 layers with 2 heads of 16 for keys and for values, in fp32.
    expected = weights - table + 2 * 2 * 64 if name == "llama-gqa" else weights
    assert found.weights == expected
    assert found.cache == (30 + 2) * 3 * 2 * 2 * 16 * 4


def test_a_tied_head_that_is_quantized_is_read_beside_rows_of_the_table(tmp_path: Path) -> None:
    engine = engine_of("llama-tied", tmp_path, quantization="mxfp8", quantize_lm_head=True)
    table = 2 * 64 * VOCAB_SIZE
    assert Bytes(engine.loaded).of(STEP).weights == engine.loaded.report.bytes_after - table + 2 * 2 * 64


def test_a_hybrid_reads_and_writes_its_states_and_the_experts_that_were_chosen(tmp_path: Path) -> None:
    engine = engine_of("nemotron-mixed", tmp_path, quantization="mxfp8")
    counted = Bytes(engine.loaded)
    layout, kernels = engine.loaded.model.arch.layout, engine.loaded.kernels
    state = layout.state_bytes(kernels.activation_dtype, kernels.state_dtype)
    assert counted.of(STEP).cache == 32 * layout.kv_bytes_per_token(kernels.activation_dtype) + 2 * 2 * state
    assert state > 0
    few, more = (counted.of(STEP, touched).weights for touched in ((3, 3), (3, 5)))
    # An expert's two matrices of 58 x 72, in MXFP8: 72 has 3 blocks of 32, and 58 has 2.
    assert more - few == 2 * (58 * (72 + 3) + 72 * (58 + 2))
    whole = counted.of(STEP, (8, 8)).weights
    assert whole == engine.loaded.report.bytes_after - 2 * 72 * VOCAB_SIZE + 2 * 2 * 72


def test_even_choices_touch_as_many_experts_as_probability_says() -> None:
    mixtures = Mixtures((128, 4), (6, 2), 1.0)
    assert mixtures.expected(1) == pytest.approx((6, 2))
    assert mixtures.expected(64)[0] == pytest.approx(128 * (1 - (122 / 128) ** 64))
    assert mixtures.expected(10**6) == pytest.approx((128, 4))
    assert sum((Moved(1, 2), Moved(3, 4)), Moved()).total == 10


def test_routers_are_watched_and_left_as_they_were(tmp_path: Path) -> None:
    engine = engine_of("mixtral", tmp_path)
    mixtures = [module for module in engine.loaded.model.modules() if isinstance(module, MoE)]
    gates = [mixture.gate for mixture in mixtures]
    engine.add(engine.make_request("r", [5], SamplingParams(max_tokens=2, ignore_eos=True)))
    with watched_routers(engine.loaded.model) as choices:
        before = choices.touched
        engine.step()
    assert before is None
    assert choices.touched == (2,) * len(mixtures)  # one token, two experts of each layer
    assert [mixture.gate for mixture in mixtures] == gates
    engine.step()
