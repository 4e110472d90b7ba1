"""Batches of ids through a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eightfold.config import EngineConfig
from eightfold.engine.loading import LoadedModel
from eightfold.engine.runner import Runner
from eightfold.types import Batch, Chunk, Request, SamplingParams, Sequence
from tests.models.checkpoints import case, random_prompt, reference_logits, reference_model, save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(case("qwen2"), tmp_path_factory.mktemp("qwen2"))


def load(folder: Path, **options: Any) -> Runner:
    return Runner(LoadedModel(EngineConfig(model=str(folder), **{"max_total_tokens": 256, **options})))


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
    kept = [runner.pool.layers[0].kv, load(folder, dtype="bfloat16", page_size=8, max_total_tokens=100).pool.layers[0].kv]
    expected = [((12, 8, 2, 16), torch.float32), ((12, 8, 2, 16), torch.bfloat16)]
    assert [(keys.shape, keys.dtype) for keys, _ in filter(None, kept)] == expected
