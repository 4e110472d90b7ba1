"""Loading into a runner: what is decided before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eightfold.config import EngineConfig
from eightfold.engine.runner import Runner
from eightfold.errors import InputError
from eightfold.models.checkpoint import Checkpoint
from eightfold.types import Batch, Chunk, Request, SamplingParams, Sequence
from tests.models.checkpoints import case, random_prompt, reference_logits, reference_model, save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(case("qwen2"), tmp_path_factory.mktemp("qwen2"))


def load(folder: Path, **options: Any) -> Runner:
    return Runner.load(EngineConfig(model=str(folder), **{"max_total_tokens": 256, **options}))


def sequence(prompt: list[int], blocks: list[int]) -> Sequence:
    made = Sequence.start(Request("r", tuple(prompt), SamplingParams(temperature=0.0, logprobs=2).resolved({}), 0))
    made.block_table.extend(blocks)
    return made


def test_a_mixed_batch_of_chunks(folder: Path) -> None:
    """Scattered blocks, one chunk that samples and one that does not."""
    runner, reference = load(folder), reference_model(folder)
    whole, part = sequence(random_prompt(20), [7, 3]), sequence(random_prompt(30, seed=1), [11, 0])
    result = runner.run(Batch((Chunk(whole, 0, 20, samples=True), Chunk(part, 0, 17, samples=False))))
    assert result.token_ids == (int(reference_logits(reference, whole.token_ids)[-1].argmax()), None)
    result = runner.run(Batch((Chunk(part, 17, 13, samples=True),)))
    logits = reference_logits(reference, part.token_ids)[-1]
    assert result.token_ids == (int(logits.argmax()),)
    assert result.logprobs[0] is not None
    assert abs(result.logprobs[0].logprob - float(logits.log_softmax(-1).max())) < 1e-4


def test_the_pool_has_the_size_that_was_decided(folder: Path) -> None:
    runner = load(folder, page_size=8, max_total_tokens=100)
    assert runner.pool.layers[0][0].shape == (12, 8, 2, 16)
    assert runner.pool.layers[0][0].dtype == torch.float32
    assert load(folder, dtype="bfloat16").pool.layers[0][0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 4096}, "context_length: got 4096; expected at most 128, which the model was made for"),
        (
            {"max_total_tokens": 10**12},
            r"max_total_tokens: got 1000000000000; expected at most \d+, which fit beside the weights",
        ),
        ({"mem_fraction_static": 1e-9}, r"max_total_tokens: got .*mem_fraction_static of \d"),
        ({"fp8_gemm_backend": "cutlass", "quantization": "mxfp8"}, "backend cutlass, which Eightfold does not have"),
        ({"attention_backend": "fa3"}, "backend fa3, which Eightfold does not have"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_is_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda self: pytest.fail("a weight was read"))
    with pytest.raises(InputError, match=message):
        Runner.load(EngineConfig(**{"model": str(folder), **options}))
