"""The engine: requests in, token events out. It knows no text.

`step()` is the whole of it: the scheduler says what to compute, the runner computes it, and the scheduler takes the tokens in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from eightfold.cache.manager import CacheManager
from eightfold.cache.states import StateSlots
from eightfold.config import EngineConfig, ResolvedConfig
from eightfold.engine.loading import LoadedModel, check_configuration
from eightfold.engine.runner import Runner
from eightfold.engine.scheduler import Scheduler
from eightfold.errors import InputError
from eightfold.requests import make_request, mixed_seed
from eightfold.types import Constraint, Grammar, GrammarCompiler, Progress, Request, SamplingParams, TokenEvent


class Engine:
    """One model, its caches, and the requests that it works on.

    Attributes:
        loaded: the model, with the report of loading it.
        runner: the model's tensors at work.
        scheduler: its queues and counters, for those who watch.
        config: everything that was decided.
        vocab_size: token ids lie below it.
        grammar_compiler: makes constraints of grammars, where somebody who knows the tokenizer gave one.
    """

    def __init__(self, loaded: LoadedModel, runner: Runner) -> None:
        """Begin with empty queues and an empty cache."""
        self.loaded, self.runner = loaded, runner
        self.config = config = loaded.config
        self.vocab_size = loaded.vocab_size
        self.grammar_compiler: GrammarCompiler | None = None
        manager = CacheManager(
            config.max_total_tokens // config.page_size,
            config.page_size,
            enable_prefix_cache=not config.disable_prefix_cache,
            states=_state_slots(config),
            track_interval=config.mamba_track_interval,
        )
        self.scheduler = Scheduler(
            manager,
            max_running_requests=config.max_running_requests,
            max_batch_tokens=config.chunked_prefill_size,
            context_length=config.context_length,
            eos_token_ids=loaded.generation.eos_token_ids,
        )
        self._num_requests = 0

    @classmethod
    def load(cls, config: EngineConfig, *, report: Progress | None = None) -> Self:
        """Find the checkpoint, decide the configuration, load and quantize, and make the caches.

        Raises:
            InputError: a value, a checkpoint or a backend that cannot be used; all but damaged weights are found before any
                weight is read.
        """
        loaded = LoadedModel(config, report=report)
        return cls(loaded, Runner(loaded))

    @staticmethod
    def check(path: Path) -> None:
        """Raise CheckpointError where the configuration of a checkpoint folder cannot be served; no weight is read."""
        check_configuration(path)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.loaded.generation.eos_token_ids

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Sampling values for what a request leaves open, by the names of `SamplingParams`."""
        return self.loaded.generation.sampling if self.config.sampling_defaults == "model" else {}

    def update_weights(self, model: str, *, revision: str | None = None, report: Progress | None = None) -> None:
        """Put the weights of another checkpoint of the same shapes in the place of these, quantized as these were.

        Everything that was derived from the old ones goes: layouts, choices of backends, cached prefixes. The tokenizer stays.

        Args:
            model: a folder, a hub id or an alias.
            revision: branch, tag or commit of a hub id.
            report: told about downloads and loading.

        Raises:
            InputError: requests are not done, or a checkpoint cannot be used or has other shapes; the engine goes on as before.
            RuntimeError: loading failed, and so did loading the former weights: the engine can no longer be used.
        """
        if self.has_work:
            raise InputError(
                "update_weights",
                got="requests that are not done",
                expected="none, since an answer has one model",
                remedy="Wait for them, or abort them.",
            )
        self.loaded.update(model, revision=revision, report=report)
        self.scheduler.eos_token_ids = self.eos_token_ids
        self.scheduler.manager.flush()

    def make_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        """A request with every sampling value and the seed decided.

        Raises:
            InputError: an empty prompt, one that is too long, token ids outside the vocabulary, a grammar that cannot be used.
        """
        self._constraint(params.grammar)  # compiled once for all requests that have it
        request = make_request(
            request_id,
            prompt_token_ids,
            params,
            context_length=self.config.context_length,
            vocab_size=self.vocab_size,
            sampling_defaults=self.sampling_defaults,
            seed=mixed_seed(self.config.seed, self._num_requests + 1),
        )
        self._num_requests += 1
        return request

    def compile(self, grammar: Grammar) -> None:
        """Make a grammar ready, in any thread, so that `add` of a request with it takes no time.

        Raises:
            InputError: it cannot be used.
        """
        self._constraint(grammar)

    def add(self, request: Request) -> None:
        """Queue a request; its events come out of `step()`.

        Raises:
            InputError: its id is in use, it can never fit into the cache, or its grammar cannot be used.
        """
        self.scheduler.add(request, self._constraint(request.params.grammar))

    def _constraint(self, grammar: Grammar | None) -> Constraint | None:
        if grammar is None:
            return None
        if self.grammar_compiler is None:
            raise InputError("grammar", got=f"a {grammar.kind}", expected="none: this engine has no grammar compiler")
        return self.grammar_compiler.compile(grammar)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now and free what it holds; its last event, or None where there is no such request."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Compute one batch, and tell what came of it."""
        batch = self.scheduler.schedule()
        with self.scheduler.counters.steps.measure(batch):
            result = self.runner.run(batch)
        return self.scheduler.postprocess(batch, result)


def _state_slots(config: ResolvedConfig) -> StateSlots | None:
    """A slot for each request that may run, and the others for checkpoints; None where no layer recurs."""
    if not config.max_mamba_cache_size:
        return None
    return StateSlots(config.max_running_requests, config.max_mamba_cache_size - config.max_running_requests)
