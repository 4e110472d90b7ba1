"""Loading a model: what is decided before weights are read; and other weights for one in service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.engine.loading import LoadedModel
from eightfold.errors import CheckpointError, InputError
from eightfold.layers.linear import Linear
from eightfold.models.checkpoint import Checkpoint
from eightfold.types import SamplingParams, TokenLogprobs
from tests.models.checkpoints import case, random_prompt, save_checkpoint

CASES = ("qwen2", "llama-tied", "mixtral", "nemotron-latent")
PROMPT = random_prompt(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(case("qwen2"), tmp_path_factory.mktemp("qwen2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 4096}, "context_length: got 4096; expected at most 128, which the model was made for"),
        (
            {"max_total_tokens": 10**12},
            r"max_total_tokens: got 1000000000000; expected at most \d+, which fit beside the weights",
        ),
        ({"mem_fraction_static": 1e-9}, r"max_total_tokens: got .*mem_fraction_static of \d"),
        (
            {"fp8_gemm_backend": "cutlass", "quantization": "mxfp8"},
            "fp8_gemm_backend: got cutlass, which Eightfold does not have",
        ),
        ({"attention_backend": "fa3"}, "attention_backend: got fa3, which Eightfold does not have"),
        (
            {"fp8_gemm_backend": "reference"},
            "fp8_gemm_backend: got reference for weights that are not quantized; expected auto",
        ),
        (
            {"moe_runner_backend": "reference", "quantization": "mxfp8"},
            "moe_runner_backend: got reference for a model without experts; expected auto",
        ),
        ({"scale_rule": "floor"}, "scale_rule: got floor for weights of which none is quantized"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda self: pytest.fail("a weight was read"))
    with pytest.raises(InputError, match=message):
        LoadedModel(EngineConfig(**{"model": str(folder), **options}))


def engine_of(folder: Path, quantization: str | None = "mxfp8", **options: Any) -> Engine:
    values: dict[str, Any] = {"max_total_tokens": 256, "max_running_requests": 4, "disable_prefix_cache": True}
    return Engine.load(EngineConfig(model=str(folder), quantization=quantization, **(values | options)))  # type: ignore[arg-type]


def answer(engine: Engine, prompt: list[int] = PROMPT) -> list[TokenLogprobs | None]:
    """Tokens and log probabilities, to the last bit."""
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)
    engine.add(engine.make_request("r", prompt, params))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check_integrity()
    return [event.logprobs for event in events]


def addresses(engine: Engine) -> list[int]:
    """Where the operands of the products lie."""
    linears = [module for module in engine.loaded.model.modules() if isinstance(module, Linear)]
    return [linear._prepared.data for linear in linears]


@pytest.mark.parametrize("quantization", ["mxfp8", None])
@pytest.mark.parametrize("name", CASES)
def test_new_weights_answer_as_after_a_fresh_start_and_old_ones_to_the_bit(
    name: str, quantization: str | None, tmp_path: Path
) -> None:
    first, second = (save_checkpoint(case(name), tmp_path / str(seed), seed=seed) for seed in (0, 1))
    engine = engine_of(first, quantization)
    before, where = answer(engine), addresses(engine)
    engine.update_weights(str(second))
    assert answer(engine) == answer(engine_of(second, quantization)) != before
    engine.update_weights(str(first))
    assert answer(engine) == before
    assert addresses(engine) == where
    assert engine.loaded.path == first


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_every_choice_is_made_anew(backend: str, folder: Path) -> None:
    engine = engine_of(folder, fp8_gemm_backend=backend)
    before = answer(engine)
    engine.update_weights(str(folder))
    assert answer(engine) == before
    chosen = [item.choice.backend.name for module in engine.loaded.model.modules() for item in module.chosen]
    assert chosen.count(backend) >= 12


def test_cached_prefixes_are_of_the_old_weights(tmp_path: Path) -> None:
    first, second = (save_checkpoint(case("qwen2"), tmp_path / str(seed), seed=seed) for seed in (0, 1))
    engine = engine_of(first, disable_prefix_cache=False)
    answer(engine, PROMPT + PROMPT)
    engine.update_weights(str(second))
    assert answer(engine, PROMPT + PROMPT) == answer(engine_of(second), PROMPT + PROMPT)
    assert engine.scheduler.counters.prefix_hits == 0


def test_end_tokens_and_sampling_come_with_the_weights(tmp_path: Path) -> None:
    first, second = (save_checkpoint(case("qwen2"), tmp_path / str(seed), seed=seed) for seed in (0, 1))
    (second / "generation_config.json").write_text(json.dumps({"eos_token_id": 5, "temperature": 0.5}))
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    engine = engine_of(first)
    engine.update_weights(str(second))
    assert engine.eos_token_ids == engine.scheduler.eos_token_ids == frozenset({5})
    assert engine.make_request("r", PROMPT, SamplingParams()).params.temperature == 0.5


@pytest.mark.parametrize(
    ("other", "changes", "message"),
    [
        (
            "qwen2",
            {"intermediate_size": 128},
            r"intermediate_size of .*: got 128; expected 96, as the model has that is loaded",
        ),
        ("qwen3", {}, "a model of type qwen3; expected qwen2|model_type of .*: got qwen3; expected qwen2"),
        ("nemotron-mixed", {}, "got a model of type nemotron_h; expected qwen2"),
    ],
)
def test_other_shapes_are_refused_and_nothing_is_touched(
    other: str, changes: dict[str, Any], message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder)
    before = answer(engine)
    save_checkpoint(case(other), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.setattr(Checkpoint, "read", lambda self: pytest.fail("a weight was read"))
    with pytest.raises(CheckpointError, match=message):
        engine.update_weights(str(tmp_path))
    assert answer(engine) == before


def test_a_tensor_that_is_missing_is_found_before_anything_is_touched(folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder)
    before = answer(engine)
    save_checkpoint(case("qwen2"), tmp_path, seed=1)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight: got no such tensor"):
        engine.update_weights(str(tmp_path))
    assert answer(engine) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_damaged_weights_the_former_ones_are_loaded_again(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    engine = engine_of(folder)
    before = answer(engine)
    save_checkpoint(case("qwen2"), tmp_path, seed=1, dtype=dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight: got .*nan"):
        engine.update_weights(str(tmp_path))
    assert answer(engine) == before


def test_requests_that_are_not_done_keep_their_model(folder: Path) -> None:
    engine = engine_of(folder)
    engine.add(engine.make_request("r", PROMPT, SamplingParams(max_tokens=4)))
    with pytest.raises(InputError, match="update_weights: got requests that are not done; expected none"):
        engine.update_weights(str(folder))
    engine.abort("r")
    engine.update_weights(str(folder))
