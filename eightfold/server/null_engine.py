"""An engine of no cost, to measure the server's own: the real scheduler and cache's books around a model that only repeats."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eightfold.cache.manager import CacheManager
from eightfold.config import DEFAULT_MAX_RUNNING_REQUESTS, DEFAULT_PAGE_SIZE, EngineConfig
from eightfold.engine.scheduler import Scheduler
from eightfold.errors import CheckpointError, InputError
from eightfold.hub.resolve import resolve_model
from eightfold.server.engine_process import run
from eightfold.server.wire import Load, ServedModel
from eightfold.types import Batch, Chunk, Grammar, Progress, Request, StepResult, TokenEvent

_CONTEXT_LENGTH = 4096
_CHUNK = 8192


class NullEngine:
    """Answers every prompt with its own tokens, over and over, until `max_tokens`. No weight is read.

    Args:
        config: whose model's folder gives the vocabulary and, for the HTTP side, the tokenizer.
        step_seconds: how long a step takes.
        report: told about downloads.

    Attributes:
        path: the model's folder.
        vocab_size: token ids lie below it.
        scheduler: queues and counters, those of a real engine.
        eos_token_ids: none, so that an answer is as long as was asked.
        sampling_defaults: none.
    """

    def __init__(self, config: EngineConfig, *, step_seconds: float = 0.0, report: Progress | None = None) -> None:
        self.path: Path = resolve_model(
            config.model, revision=config.revision, report=report, needs_weights=config.needs_weights
        )
        settings = _settings(self.path)
        self.vocab_size: int = settings["vocab_size"]
        self.eos_token_ids: frozenset[int] = frozenset()
        self.sampling_defaults: Mapping[str, Any] = {}
        context = config.context_length or settings.get("max_position_embeddings", _CONTEXT_LENGTH)
        running = config.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS
        page = config.page_size or DEFAULT_PAGE_SIZE
        total = config.max_total_tokens or running * context
        self.scheduler = Scheduler(
            CacheManager(total // page, page, enable_prefix_cache=not config.disable_prefix_cache),
            max_running_requests=running,
            max_batch_tokens=config.chunked_prefill_size or _CHUNK,
            context_length=context,
            eos_token_ids=self.eos_token_ids,
        )
        self._step_seconds = step_seconds

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def compile(self, grammar: Grammar) -> None:
        """Nothing: no answer here is held to a grammar."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InputError: its id is in use, or it can never fit into the cache.
        """
        self.scheduler.add(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now; its last event, or None where there is no such request."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Repeat one token of every prompt that is through."""
        batch = self.scheduler.schedule()
        with self.scheduler.counters.steps.measure(batch):
            result = _repeat(batch)
        events = self.scheduler.postprocess(batch, result)
        if self._step_seconds:
            # It ends at a whole multiple of its time, so that whoever gets a token, on the same clock, knows its age.
            time.sleep(self._step_seconds - time.perf_counter() % self._step_seconds)
        return events

    def update_weights(self, model: str, **_: object) -> None:
        """Refuse: there are none."""
        raise InputError("update_weights", got=model, expected="an engine with weights, which the null engine is not")


def _repeat(batch: Batch) -> StepResult:
    nothing: tuple[None, ...] = (None,) * len(batch.chunks)
    return StepResult(tuple(map(_next_token, batch.chunks)), nothing, ((),) * len(batch.chunks))


def _next_token(chunk: Chunk) -> int | None:
    if not chunk.samples:
        return None
    prompt = chunk.sequence.request.prompt_token_ids
    return prompt[chunk.sequence.num_output_tokens % len(prompt)]


def _settings(path: Path) -> dict[str, Any]:
    """What of config.json is needed, whatever the model is."""
    try:
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
        settings = settings | settings.get("text_config", {})
        if not isinstance(settings["vocab_size"], int):
            raise TypeError(f"a vocab_size of {settings['vocab_size']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(str(path / "config.json"), got=repr(error), expected="JSON with a vocab_size") from error
    return dict(settings)


def main(arguments: Sequence[str]) -> None:
    """Run the process."""
    run(arguments, load)


def load(message: Load, report: Progress) -> tuple[NullEngine, Callable[[], ServedModel]]:
    """The engine, and what is to be known of it.

    Raises:
        InputError: as `NullEngine`.
    """
    engine = NullEngine(EngineConfig(**message.options), step_seconds=message.null_step_seconds, report=report)
    return engine, partial(describe, engine)


def describe(engine: NullEngine) -> ServedModel:
    """What is to be known of an engine."""
    scheduler = engine.scheduler
    return ServedModel(
        model_path=str(engine.path),
        context_length=scheduler.max_sequence_tokens,
        vocab_size=engine.vocab_size,
        eos_token_ids=(),
        sampling_defaults={},
        max_running_requests=scheduler.max_running_requests,
        num_blocks=scheduler.manager.num_blocks,
        block_size=scheduler.manager.block_size,
    )
