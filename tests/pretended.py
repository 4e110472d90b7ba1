"""An engine whose model is a function: the real scheduler and cache, and answers that a test writes down."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from eightfold.config import EngineConfig, HardwareFacts, ModelFacts, resolve
from eightfold.engine.engine import Engine
from eightfold.engine.loading import LoadedModel
from eightfold.engine.runner import Runner
from eightfold.llm import LLM
from eightfold.models.checkpoint import GenerationConfig
from eightfold.types import Batch, Sequence, StepResult, TokenLogprobs
from tests import tiny_tokenizer
from tests.tiny_tokenizer import EOS_ID

CONTEXT_LENGTH = 64
VOCAB_SIZE = 300
Choose = Callable[[Sequence], int]


class PretendedModel(LoadedModel):
    """A configuration without a model."""

    vocab_size = VOCAB_SIZE

    def __init__(self, **options: Any) -> None:
        facts = ModelFacts(CONTEXT_LENGTH, 0, {"float32": 1, "bfloat16": 1})
        values: dict[str, Any] = {"model": "pretended", "max_total_tokens": 512} | options
        self.config = resolve(EngineConfig(**values), facts, HardwareFacts("cpu", "a test", 1 << 20))
        self.generation = GenerationConfig(MappingProxyType({}), frozenset({EOS_ID}))


class PretendedRunner(Runner):
    """Chooses tokens by calling a function with the sequence."""

    def __init__(self, choose: Choose) -> None:
        self.batches: list[Batch] = []
        self._choose = choose

    def run(self, batch: Batch) -> StepResult:
        self.batches.append(batch)
        tokens = [self._choose(chunk.sequence) if chunk.samples else None for chunk in batch.chunks]
        logprobs = [
            None if token is None or chunk.sequence.request.params.logprobs is None else TokenLogprobs(token, -1.0, 1, ())
            for token, chunk in zip(tokens, batch.chunks, strict=True)
        ]
        prompt_logprobs = [
            ()
            if chunk.sequence.request.params.prompt_logprobs is None
            else tuple(
                TokenLogprobs(token, -2.0, 1, ())
                for token in chunk.sequence.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
            )
            for chunk in batch.chunks
        ]
        return StepResult(tuple(tokens), tuple(logprobs), tuple(prompt_logprobs))


class CheckedEngine(Engine):
    """Audits its books around every step."""

    def step(self) -> Any:
        self.scheduler.check_integrity()
        events = super().step()
        self.scheduler.check_integrity()
        return events


def saying(text: str) -> Choose:
    """Say `text`, then end."""
    ids = [*tiny_tokenizer.byte_level(add_bos=False).encode(text).ids, EOS_ID]
    return lambda sequence: ids[min(sequence.num_output_tokens, len(ids) - 1)]


def counting() -> Choose:
    """Letters from a to z by position, shifted by the request's seed, without an end."""
    first = tiny_tokenizer.byte_level(add_bos=False).encode("a").ids[0]
    return lambda sequence: first + (sequence.num_output_tokens + sequence.request.seed) % 26


def make_llm(choose: Choose, *, chat_template: str | None = tiny_tokenizer.CHAT_TEMPLATE, **options: Any) -> LLM:
    engine = CheckedEngine(PretendedModel(**options), PretendedRunner(choose))
    return LLM.from_engine(engine, tiny_tokenizer.make(chat_template=chat_template))


def check_idle(llm: LLM) -> None:
    """Nothing is queued, and no block is held."""
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert not llm.engine.has_work
    assert not scheduler.waiting
    assert not scheduler.running
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks
