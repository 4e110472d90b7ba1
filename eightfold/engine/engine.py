"""The engine: requests in, token events out. It knows no text.

`step()` is the whole of it: the scheduler says what to compute, the runner computes it, and the scheduler takes the tokens in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from eightfold.cache.manager import CacheManager
from eightfold.config import EngineConfig
from eightfold.engine.runner import Runner
from eightfold.engine.scheduler import Scheduler
from eightfold.errors import InputError
from eightfold.types import Progress, Request, SamplingParams, TokenEvent


class Engine:
    """One model, its caches, and the requests that it works on.

    Attributes:
        runner: the model and its tensors, with the report of loading it.
        scheduler: its queues and counters, for those who watch.
        config: everything that was decided.
        vocab_size: token ids lie below it.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.config = runner.config
        self.vocab_size = runner.vocab_size
        self.eos_token_ids = runner.generation.eos_token_ids
        self._sampling_defaults = runner.generation.sampling if self.config.sampling_defaults == "model" else {}
        self._num_requests = 0

    @classmethod
    def load(cls, config: EngineConfig, *, report: Progress | None = None) -> Engine:
        """Find the checkpoint, decide the configuration, load and quantize, and make the caches.

        Raises:
            InputError: a value, a checkpoint or a backend that cannot be used; all but damaged weights are found before any
                weight is read.
        """
        runner = Runner.load(config, report=report)
        resolved = runner.config
        manager = CacheManager(
            resolved.max_total_tokens // resolved.page_size,
            resolved.page_size,
            enable_prefix_cache=not resolved.disable_prefix_cache,
        )
        scheduler = Scheduler(
            manager,
            max_running_requests=resolved.max_running_requests,
            max_batch_tokens=resolved.chunked_prefill_size,
            context_length=resolved.context_length,
            eos_token_ids=runner.generation.eos_token_ids,
        )
        return cls(runner, scheduler)

    @staticmethod
    def check(path: Path) -> None:
        """Raise CheckpointError where the configuration of a checkpoint folder cannot be served; no weight is read."""
        Runner.check(path)

    def make_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        """A request with every sampling value and the seed decided.

        Raises:
            InputError: an empty prompt, one that is too long, token ids outside the vocabulary.
        """
        if not prompt_token_ids:
            raise InputError("prompt", got="no tokens", expected="at least one token")
        limit = self.config.context_length - 1
        if len(prompt_token_ids) > limit:
            raise InputError(
                "prompt",
                got=f"{len(prompt_token_ids)} tokens",
                expected=f"at most {limit}, which leaves one for the answer within context_length {self.config.context_length}",
            )
        for name, ids in (
            ("prompt token id", prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                    raise InputError(name, got=repr(token), expected=f"a whole number from 0 to {self.vocab_size - 1}")
        self._num_requests += 1
        seed = params.seed if params.seed is not None else _mix(self.config.seed, self._num_requests)
        return Request(request_id, tuple(prompt_token_ids), params.resolved(self._sampling_defaults), seed)

    def add(self, request: Request) -> None:
        """Queue a request; its events come out of `step()`.

        Raises:
            InputError: its id is in use, or it can never fit into the cache.
        """
        self.scheduler.add(request)

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
        result = self.runner.run(batch)
        return self.scheduler.postprocess(batch, result)


def _mix(seed: int, counter: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{counter}".encode(), digest_size=8).digest(), "little")
