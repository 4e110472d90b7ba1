"""The process that runs a real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from eightfold.config import EngineConfig
from eightfold.engine.engine import Engine
from eightfold.grammar.compiler import GrammarCompiler
from eightfold.inspection import bound_backends
from eightfold.server.engine_process import run
from eightfold.server.wire import BackendRow, ConfigRow, Load, ServedModel, TensorRow
from eightfold.text import Tokenizer
from eightfold.types import Progress


def main(arguments: Sequence[str]) -> None:
    """Run the process."""
    run(arguments, load)


class ServedEngine(Engine):
    """An engine whose answers can be held to a grammar, for which it has the tokenizer too."""

    def provide_grammars(self, tokenizer: Tokenizer) -> None:
        """Take grammars from now on."""
        self._tokenizer = tokenizer
        self.grammar_compiler = GrammarCompiler(tokenizer, self.vocab_size, self.eos_token_ids)

    def update_weights(self, model: str, *, revision: str | None = None, report: Progress | None = None) -> None:
        """As `Engine` does; other weights may end their answers with other tokens."""
        super().update_weights(model, revision=revision, report=report)
        self.provide_grammars(self._tokenizer)


def load(message: Load, report: Progress) -> tuple[ServedEngine, Callable[[], ServedModel]]:
    """The engine that was asked for, and what is to be known of it.

    Raises:
        InputError: as `Engine.load` and `Tokenizer.load`.
    """
    config = EngineConfig(**message.options)
    engine = ServedEngine.load(config, report=report)
    engine.provide_grammars(Tokenizer.load(engine.loaded.path, required=config.needs_weights))
    return engine, partial(describe, engine)


def describe(engine: Engine) -> ServedModel:
    """What is to be known of an engine as it is now."""
    loaded, config, manager = engine.loaded, engine.config, engine.scheduler.manager
    tensors = loaded.report.tensors
    return ServedModel(
        model_path=str(loaded.path),
        context_length=engine.scheduler.max_sequence_tokens,
        vocab_size=engine.vocab_size,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
        sampling_defaults=dict(engine.sampling_defaults),
        max_running_requests=config.max_running_requests,
        num_blocks=manager.num_blocks,
        block_size=manager.block_size,
        load_seconds=loaded.report.seconds,
        config=tuple(ConfigRow(item.name, str(item.value), item.kind, item.why) for item in config.origins),
        quantization=tuple(
            TensorRow(
                name=item.name,
                decision=str(config.quantization) if item.decision.quantized else "kept",
                quantized=item.decision.quantized,
                reason=item.decision.reason,
                bytes_before=item.bytes_before,
                bytes_after=item.bytes_after,
            )
            for item in tensors
        ),
        backends=tuple(
            BackendRow(
                item.operation,
                item.backend,
                item.count,
                tuple(f"{other.backend}: {other.reason}" for other in item.declined),
            )
            for item in bound_backends(loaded.model)
        ),
        notes=loaded.report.notes,
    )
