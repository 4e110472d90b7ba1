"""A scheduler with a runner that keeps a pretended cache and reads every context back through the block tables.

The next token of a sequence is a function of its whole context, so whatever goes wrong with blocks (a wrong share, a stale one,
a token that was never computed again) changes an answer, and every answer is compared with the one the request gets alone.
With recurrent states it is also a function of a state, which here is the tokens that it took in, kept in a slot. So a wrong
restore, a save at a wrong place and a slot that two sequences share are found, at the next chunk and in the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from eightfold.cache.manager import CacheManager
from eightfold.cache.prefix import extend_keys
from eightfold.cache.states import StateSlots
from eightfold.engine.scheduler import Scheduler
from eightfold.types import Batch, Chunk, Request, SamplingParams, Sequence, StepResult, TokenEvent, TokenLogprobs

VOCAB = 7
EOS = 6


@dataclass(frozen=True)
class State:
    """What a recurrent layer keeps: here the very tokens that it took in, and the oldest weights that took part."""

    tokens: tuple[int, ...]
    weights: int

    def take(self, tokens: Iterable[int], weights: int) -> State:
        return State((*self.tokens, *tokens), min(self.weights, weights))


def next_token(context: list[int], state: tuple[int, ...] | None = None) -> int:
    """A function of the context as the keys and values tell it, and as the state does, which is the same."""
    return hash((tuple(context), tuple(context) if state is None else state)) % VOCAB


class PretendedRunner:
    """Writes what stands at a position where the cache would have keys, and chooses tokens by what it reads back.

    Beside token and position it keeps the oldest weights that took part: those of the step, and those of the context read.

    Attributes:
        num_restores: states that were copied to sequences.
        num_saves: states that were copied from them.
        tokens_lost: that sequences found when they began, without a state at their end.
    """

    def __init__(self, manager: CacheManager) -> None:
        self.block_size = manager.block_size
        self.weights = 0
        self.cache: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.begun: dict[tuple[Sequence, int], int] = {}
        self.states: dict[int, State] = {}
        self.slots = manager.states
        self.num_restores = self.num_saves = self.tokens_lost = 0

    def run(self, batch: Batch) -> StepResult:
        for chunk in batch.chunks:
            self.meet(chunk)
            self.read(chunk.sequence, chunk.start)  # before any chunk of this batch has written
        for chunk in batch.chunks:
            self.write(chunk)
        states = [None] * len(batch.chunks) if self.slots is None else self.recur(batch, self.slots)
        tokens: list[int | None] = []
        prompt_logprobs: list[tuple[TokenLogprobs, ...]] = []
        for chunk, state in zip(batch.chunks, states, strict=True):
            context = self.read(chunk.sequence, chunk.start + chunk.length)
            tokens.append(next_token(context, state) if chunk.samples else None)
            following = chunk.sequence.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
            wanted = chunk.sequence.request.params.prompt_logprobs is not None
            prompt_logprobs.append(tuple(TokenLogprobs(token, 0.0, 1, ()) for token in following) if wanted else ())
        return StepResult(tuple(tokens), (None,) * len(tokens), tuple(prompt_logprobs))

    def meet(self, chunk: Chunk) -> None:
        """Notice a sequence that begins, or begins again: it goes on from a state, or it starts from nothing."""
        sequence = chunk.sequence
        begins = (sequence, sequence.num_preemptions) not in self.begun
        assert (chunk.restore_from is not None) == (begins and chunk.start > 0 and self.slots is not None)
        if begins:
            self.begun[sequence, sequence.num_preemptions] = self.weights
            self.tokens_lost += sequence.num_matched_tokens - chunk.start

    def recur(self, batch: Batch, slots: StateSlots) -> list[tuple[int, ...]]:
        """States at the ends of chunks. All restores come first, then every chunk reads its state, then all are written."""
        checkpoints = range(slots.num_sequences, slots.num_sequences + slots.num_checkpoints)
        own = [_state_slot(chunk.sequence) for chunk in batch.chunks]
        assert len(set(own)) == len(own)
        assert set(own) <= set(range(slots.num_sequences))
        restores = [
            (slot, chunk.restore_from) for slot, chunk in zip(own, batch.chunks, strict=True) if chunk.restore_from is not None
        ]
        assert all(source in checkpoints for _, source in restores)
        self.states.update({target: self.states[source] for target, source in restores})
        written: dict[int, State] = {}
        for slot, chunk in zip(own, batch.chunks, strict=True):
            tokens, end = chunk.sequence.token_ids, chunk.start + chunk.length
            state = self.states[slot] if chunk.start else State((), self.weights)
            assert state.tokens == tuple(tokens[: chunk.start])
            assert state.weights >= self.begun[chunk.sequence, chunk.sequence.num_preemptions]
            assert [save.position for save in chunk.saves] == sorted({save.position for save in chunk.saves})
            for save in chunk.saves:
                assert chunk.start < save.position <= end
                assert save.position % self.block_size == 0
                assert save.slot in checkpoints
                assert save.slot not in written
                written[save.slot] = state.take(tokens[chunk.start : save.position], self.weights)
            written[slot] = state.take(tokens[chunk.start : end], self.weights)
        self.states.update(written)
        self.num_restores += len(restores)
        self.num_saves += len(written) - len(own)
        return [written[slot].tokens for slot in own]

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self.block_size], position % self.block_size

    def write(self, chunk: Chunk) -> None:
        for position in range(chunk.start, chunk.start + chunk.length):
            before = self.cache[self.slot(chunk.sequence, position - 1)][2] if position else self.weights
            entry = chunk.sequence.token_ids[position], position, min(before, self.weights)
            self.cache[self.slot(chunk.sequence, position)] = entry

    def read(self, sequence: Sequence, length: int) -> list[int]:
        entries = [self.cache[self.slot(sequence, position)] for position in range(length)]
        context = [token for token, _, _ in entries]
        assert context == sequence.token_ids[:length]
        assert [position for _, position, _ in entries] == list(range(length))
        oldest = min((weights for _, _, weights in entries), default=self.weights)
        assert oldest >= self.begun[sequence, sequence.num_preemptions], "read what weights before its time have computed"
        return context


def _state_slot(sequence: Sequence) -> int:
    assert sequence.state_slot is not None
    return sequence.state_slot


class World:
    """A scheduler, its runner, and what was heard of each request."""

    def __init__(
        self,
        *,
        num_blocks: int = 12,
        block_size: int = 4,
        running: int = 8,
        budget: int = 8,
        context: int = 40,
        checkpoints: int | None = None,
        interval: int = 8,
        prefix_cache: bool = True,
    ) -> None:
        """With a number of `checkpoints`, 0 included, the model has recurrent states."""
        self.states = StateSlots(running, checkpoints) if checkpoints is not None else None
        self.manager = CacheManager(
            num_blocks, block_size, enable_prefix_cache=prefix_cache, states=self.states, track_interval=interval
        )
        self.scheduler = Scheduler(
            self.manager,
            max_running_requests=running,
            max_batch_tokens=budget,
            context_length=context,
            eos_token_ids=frozenset({EOS}),
        )
        self.runner = PretendedRunner(self.manager)
        self.requests: dict[str, Request] = {}
        self.events: dict[str, list[TokenEvent]] = {}

    def add(self, prompt: list[int], **params: Any) -> str:
        name = f"r{len(self.requests)}"
        request = Request(name, tuple(prompt), SamplingParams(**params), 0)
        self.scheduler.add(request)
        self.requests[name], self.events[name] = request, []
        return name

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> Batch:
        num_decodes = sum(item.num_remaining_tokens == 1 for item in self.scheduler.running)
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert batch.chunks, "a step without progress"
        assert all(chunk.length >= 1 for chunk in batch.chunks)
        assert batch.num_tokens <= max(self.scheduler.max_batch_tokens, num_decodes + 1)
        result = self.runner.run(batch)
        meanwhile()
        for event in self.scheduler.postprocess(batch, result):
            self.events[event.request_id].append(event)
        self.scheduler.check_integrity()
        assert all(item.num_remaining_tokens == 1 for item in self.scheduler.running[:-1])
        self.check_states()
        return batch

    def check_states(self) -> None:
        """Every checkpoint holds the tokens that its key stands for, and nothing is reserved between steps."""
        if self.states is None:
            return
        assert not self.states._reserved
        block_size = self.manager.block_size
        for key, item in self.states._found.items():
            state, keys = self.runner.states[item.slot], list[bytes]()
            assert len(state.tokens) == item.num_blocks * block_size
            extend_keys(keys, state.tokens, block_size, item.num_blocks)
            assert keys[-1] == key
            assert state.weights == self.runner.weights

    def change_weights(self) -> None:
        self.manager.flush()
        self.runner.weights += 1

    def abort(self, name: str) -> None:
        event = self.scheduler.abort(name)
        if event is not None:
            self.events[name].append(event)
        self.scheduler.check_integrity()

    def drain(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("the work does not end")

    def answer(self, name: str) -> list[int]:
        return [event.token_id for event in self.events[name] if event.token_id is not None]

    def alone(self, name: str) -> tuple[list[int], str]:
        """Tokens and reason that the request should end with, by the definition of each parameter."""
        request, tokens = self.requests[name], list[int]()
        context, limit = list(request.prompt_token_ids), self.scheduler.max_sequence_tokens
        while True:
            token = next_token(context)
            context.append(token)
            tokens.append(token)
            ends = token in request.params.stop_token_ids or (token == EOS and not request.params.ignore_eos)
            if ends and len(tokens) > request.params.min_tokens:
                return tokens, "stop"
            if len(tokens) >= request.params.max_tokens or len(context) >= limit:
                return tokens, "length"

    def check_answers(self) -> None:
        for name, events in self.events.items():
            reasons = [event.finish_reason for event in events if event.finish_reason is not None]
            assert len(reasons) == 1, f"{name} ended {len(reasons)} times"
            assert events[-1].finish_reason is not None
            tokens, reason = self.alone(name)
            if reasons == ["abort"]:
                assert self.answer(name) == tokens[: len(self.answer(name))]
            else:
                assert (self.answer(name), reasons) == (tokens, [reason])
            assert len({event.num_cached_tokens for event in events}) == 1
            wanted = self.requests[name].params.prompt_logprobs is not None and events[0].token_id is not None
            reported = [item.token_id for event in events for item in event.prompt_logprobs]
            assert reported == (list(self.requests[name].prompt_token_ids[1:]) if wanted else [])
            stops = [event.stop_token_id for event in events]
            assert stops == [None] * (len(events) - 1) + [tokens[-1] if reasons == ["stop"] else None]
        counters = self.scheduler.counters
        assert counters.prompt_tokens == sum(len(request.prompt_token_ids) for request in self.requests.values())
        assert counters.generated_tokens == sum(len(self.answer(name)) for name in self.requests)
        assert sum(counters.finished.values()) == len(self.requests)
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert counters.prefix_tokens_lost == self.runner.tokens_lost
        if self.states is None:
            assert counters.prefix_tokens_lost == 0
        else:
            assert self.states.num_used_sequences == 0

    def check_nothing_is_left(self) -> None:
        """After the last request, and a flush, everything is free and nothing is found."""
        self.manager.flush()
        self.scheduler.check_integrity()
        assert not self.scheduler.has_work
        assert self.manager.num_free_blocks == self.manager.num_blocks
        if self.states is not None:
            assert (self.states.num_used_sequences, self.states.num_used_checkpoints) == (0, 0)
            assert list(self.states.checkpoint_keys) == []
