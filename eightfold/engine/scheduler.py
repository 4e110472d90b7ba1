"""Which tokens the next step computes, and what its results mean.

A step first advances every sequence that decodes, then computes chunks of prompts in the order of arrival, up to a budget of
tokens, in one batch: a long prompt never stalls running answers. When a sequence finds no block, the one that arrived last
gives its blocks back and waits at the head of the queue, to be computed again; its generated tokens stay.

Why there is always progress: the sequence that arrived first can take the blocks of every other one, and `add` refuses what
would not fit into the whole cache. Why nobody starves: `running` and then `waiting` is the order of arrival, and nobody starts
while one that runs is left out of a step. So only the last one that runs can be in the middle of its prompt. Why nothing is
lost: a sequence is in exactly one of `waiting` and `running` until its last event.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from eightfold.cache.manager import CacheManager
from eightfold.engine.metrics import StepTimes
from eightfold.errors import InputError
from eightfold.types import (
    Batch,
    Chunk,
    Constraint,
    FinishReason,
    Request,
    Sequence,
    SequenceStatus,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)


@dataclass(slots=True)
class Counters:
    """Plain numbers for whoever watches, since the start.

    Attributes:
        prompt_tokens: of all requests that were added.
        generated_tokens: of all answers.
        prefix_queries: tokens of admitted sequences, preempted ones each time that they return.
        prefix_hits: those of them that were in the cache.
        prefix_tokens_lost: those of them whose keys and values were in the cache, and no recurrent state with them.
        preemptions: how often a sequence gave its blocks back.
        finished: requests by the reason of their end.
        steps: times of steps, by what they computed.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_tokens_lost: int = 0
    preemptions: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    steps: StepTimes = field(default_factory=StepTimes)


class Scheduler:
    """Queues of sequences over one cache.

    Args:
        manager: the cache's books.
        max_running_requests: most sequences that hold blocks at once.
        max_batch_tokens: most tokens of a step; decodes are never held back by it, and prompts always get at least one.
        context_length: most tokens of a sequence.
        eos_token_ids: tokens that end an answer, unless the request ignores them.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        max_running_requests: int,
        max_batch_tokens: int,
        context_length: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.manager = manager
        self.max_running_requests = max_running_requests
        self.max_batch_tokens = max_batch_tokens
        self.context_length = context_length
        self.max_sequence_tokens = min(context_length, manager.num_tokens)
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._live: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._live)

    def add(self, request: Request, constraint: Constraint | None = None) -> None:
        """Queue a request, with its grammar at work where it has one.

        A prompt that fits is taken even where the whole answer might not: generation then ends with "length" when the sequence
        fills the context or the cache.

        Raises:
            InputError: its id is in use, or its prompt is empty or leaves no room for a token in the context or in the cache.
        """
        if request.request_id in self._live:
            raise InputError("request_id", got=request.request_id, expected="one that is not in use")
        if not request.prompt_token_ids:
            raise InputError("prompt", got="no tokens", expected="at least one token")
        if len(request.prompt_token_ids) >= self.max_sequence_tokens:
            raise InputError(
                "prompt",
                got=f"{len(request.prompt_token_ids)} tokens",
                expected=f"at most {self.max_sequence_tokens - 1}, which leaves one for the answer",
                remedy="A larger --max-total-tokens would hold it." if self.max_sequence_tokens < self.context_length else "",
            )
        sequence = Sequence.start(request, constraint)
        self._live[request.request_id] = sequence
        self.waiting.append(sequence)
        self.counters.prompt_tokens += sequence.num_prompt_tokens

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request between two steps and free its blocks; its last event, or None where there is no such request.

        A batch that is on its way may hold the sequence: `postprocess` passes over its result.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        return self._abort(sequence)

    def schedule(self) -> Batch:
        """The next batch; empty only where there is no work."""
        num_running = len(self.running)
        scheduled: dict[Sequence, Chunk] = {}
        for sequence in [item for item in self.running if item.num_remaining_tokens == 1]:
            self._extend(sequence, 1, scheduled)
        budget = max(1, self.max_batch_tokens - len(scheduled))
        for sequence in [item for item in self.running if item.num_remaining_tokens > 1]:
            if budget > 0:
                budget -= self._extend(sequence, budget, scheduled)
        if len(scheduled) == num_running:  # else a new one would take the blocks that one of them waits for
            self._admit(budget, scheduled)
        return Batch(tuple(scheduled.values()))

    def postprocess(self, batch: Batch, result: StepResult) -> list[TokenEvent]:
        """Take in what a batch computed, and tell what came of it."""
        events: list[TokenEvent] = []
        for chunk, token_id, logprobs, prompt_logprobs in zip(
            batch.chunks, result.token_ids, result.logprobs, result.prompt_logprobs, strict=True
        ):
            sequence = chunk.sequence
            if sequence.status is SequenceStatus.FINISHED:
                self.manager.discard(chunk.saves)
                continue
            sequence.num_computed_tokens = chunk.start + chunk.length
            # A preempted prompt is computed again; its first results are kept.
            sequence.prompt_logprobs.extend(prompt_logprobs[max(0, len(sequence.prompt_logprobs) - chunk.start) :])
            self.manager.commit(sequence, chunk.saves)
            if token_id is not None:
                events.append(self._append(sequence, token_id, logprobs))
            elif chunk.samples:  # its grammar came to where no token leads on
                failure = sequence.constraint.failure if sequence.constraint is not None else ""
                events.append(self._abort(sequence, failure or "a grammar that leaves no token to choose"))
        return events

    def check_integrity(self) -> None:
        """Audit queues and cache.

        Raises:
            RuntimeError: naming what does not balance.
        """
        queued = [(item, SequenceStatus.RUNNING) for item in self.running] + [
            (item, SequenceStatus.WAITING) for item in self.waiting
        ]
        if [item for item, _ in queued] != list(self._live.values()):
            raise RuntimeError(
                f"{len(queued)} sequences are queued and {len(self._live)} are live, or their order is not that of arrival"
            )
        for sequence, status in queued:
            name = sequence.request.request_id
            if sequence.status is not status:
                raise RuntimeError(f"{name} is {sequence.status.value} in the queue of those {status.value}")
            if status is SequenceStatus.WAITING and (sequence.block_table or sequence.state_slot is not None):
                raise RuntimeError(f"{name} waits and holds blocks {sequence.block_table}, state slot {sequence.state_slot}")
            if sequence.num_remaining_tokens < 1:
                raise RuntimeError(f"{name} has computed {sequence.num_computed_tokens} of {len(sequence.token_ids)} tokens")
        if len(self.running) > self.max_running_requests:
            raise RuntimeError(f"{len(self.running)} sequences run where {self.max_running_requests} may")
        self.manager.check_integrity(item for item, _ in queued)

    def _extend(self, sequence: Sequence, budget: int, scheduled: dict[Sequence, Chunk]) -> int:
        """Schedule up to `budget` tokens of a running sequence; how many it became.

        Sequences that arrived later make room by being preempted, the last one first; they are not in the batch yet, since it
        fills in the order of arrival. Where there is none, a decode makes room itself, and a prompt keeps its blocks and waits
        for the next step.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return 0  # preempted by one before it in this step
        length = min(budget, sequence.num_remaining_tokens)
        while not self.manager.allocate(sequence, sequence.num_computed_tokens + length):
            victim = self.running[-1]
            if victim is sequence and sequence.num_remaining_tokens > 1:
                return 0
            self._preempt(victim)
            if victim is sequence:
                return 0
        scheduled[sequence] = self._chunk(sequence, length)
        return length

    def _admit(self, budget: int, scheduled: dict[Sequence, Chunk]) -> None:
        """Start waiting sequences in the order of arrival while there is room and budget."""
        while self.waiting and budget > 0 and len(self.running) < self.max_running_requests:
            sequence = self.waiting[0]
            self.manager.begin(sequence)
            length = min(budget, sequence.num_remaining_tokens)
            if not self.manager.allocate(sequence, sequence.num_computed_tokens + length):
                self.manager.free(sequence)
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = SequenceStatus.RUNNING
            self.counters.prefix_queries += len(sequence.token_ids)
            self.counters.prefix_hits += sequence.num_computed_tokens
            self.counters.prefix_tokens_lost += sequence.num_matched_tokens - sequence.num_computed_tokens
            if sequence.num_preemptions == 0:
                sequence.num_cached_tokens = sequence.num_computed_tokens
            scheduled[sequence] = self._chunk(sequence, length, restore_from=self.manager.restore(sequence))
            budget -= length

    def _chunk(self, sequence: Sequence, length: int, *, restore_from: int | None = None) -> Chunk:
        return Chunk(
            sequence,
            sequence.num_computed_tokens,
            length,
            samples=length == sequence.num_remaining_tokens,
            restore_from=restore_from,
            saves=self.manager.plan_saves(sequence, length),
        )

    def _preempt(self, sequence: Sequence) -> None:
        self.manager.free(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.counters.preemptions += 1

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        """Add a generated token, and end the sequence where it says so."""
        is_first = sequence.num_output_tokens == 0
        sequence.token_ids.append(token_id)
        self.counters.generated_tokens += 1
        reason = self._finish_reason(sequence, token_id)
        if reason is not None:
            self._end(sequence, reason)
        return TokenEvent(
            sequence.request.request_id,
            token_id,
            logprobs=logprobs,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
            num_cached_tokens=sequence.num_cached_tokens,
            finish_reason=reason,
            stop_token_id=token_id if reason == "stop" else None,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.request.params
        ends = token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos)
        # A grammar lets an end token come that early only where it allows nothing else.
        if ends and (sequence.num_output_tokens > params.min_tokens or sequence.constraint is not None):
            return "stop"
        if sequence.num_output_tokens >= params.max_tokens or len(sequence.token_ids) >= self.max_sequence_tokens:
            return "length"
        return None

    def _abort(self, sequence: Sequence, failure: str = "") -> TokenEvent:
        self._end(sequence, "abort")
        return TokenEvent(
            sequence.request.request_id,
            None,
            num_cached_tokens=sequence.num_cached_tokens,
            finish_reason="abort",
            failure=failure,
        )

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        self.manager.free(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self._live[sequence.request.request_id]
        self.counters.finished[reason] += 1
