"""The scheduler against a runner that keeps a pretended cache and reads every context back through the block tables.

The next token of a sequence is a function of its whole context, so whatever goes wrong with blocks (a wrong share, a stale one,
a token that was never computed again) changes an answer, and every answer is compared with the one the request gets alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eightfold.cache.blocks import BlockPool
from eightfold.cache.manager import CacheManager
from eightfold.engine.scheduler import Scheduler
from eightfold.errors import InputError
from eightfold.types import (
    Batch,
    Chunk,
    Request,
    SamplingParams,
    Sequence,
    StepResult,
    TokenEvent,
    TokenLogprobs,
)

VOCAB = 7
EOS = 6


def next_token(context: list[int]) -> int:
    return hash(tuple(context)) % VOCAB


class PretendedRunner:
    """Writes what stands at a position where the cache would have keys, and chooses tokens by what it reads back.

    Beside token and position it keeps the oldest weights that took part: those of the step, and those of the context read.
    """

    def __init__(self, manager: CacheManager) -> None:
        self.block_size = manager.block_size
        self.weights = 0
        self.cache: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.begun: dict[tuple[Sequence, int], int] = {}

    def run(self, batch: Batch) -> StepResult:
        for chunk in batch.chunks:
            self.begun.setdefault((chunk.sequence, chunk.sequence.num_preemptions), self.weights)
            self.read(chunk.sequence, chunk.start)  # before any chunk of this batch has written
        for chunk in batch.chunks:
            self.write(chunk)
        tokens: list[int | None] = []
        prompt_logprobs: list[tuple[TokenLogprobs, ...]] = []
        for chunk in batch.chunks:
            context = self.read(chunk.sequence, chunk.start + chunk.length)
            tokens.append(next_token(context) if chunk.samples else None)
            following = chunk.sequence.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.length + 1]
            wanted = chunk.sequence.request.params.prompt_logprobs is not None
            prompt_logprobs.append(tuple(TokenLogprobs(token, 0.0, 1, ()) for token in following) if wanted else ())
        return StepResult(tuple(tokens), (None,) * len(tokens), tuple(prompt_logprobs))

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


class World:
    """A scheduler, its runner, and what was heard of each request."""

    def __init__(
        self, *, num_blocks: int = 12, block_size: int = 4, running: int = 8, budget: int = 8, context: int = 40
    ) -> None:
        self.manager = CacheManager(num_blocks, block_size)
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
        return batch

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


class SchedulerMachine(RuleBasedStateMachine):
    """Any mixture of arrivals, steps, aborts and flushes, over small pools where preemption is common."""

    @initialize(
        num_blocks=st.integers(3, 12), block_size=st.integers(1, 4), running=st.integers(1, 6), budget=st.integers(1, 12)
    )
    def make(self, num_blocks: int, block_size: int, running: int, budget: int) -> None:
        self.world = World(num_blocks=num_blocks, block_size=block_size, running=running, budget=budget)

    @rule(
        start=st.integers(0, 2),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 25),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def arrive(self, start: int, length: int, max_tokens: int, ignore_eos: bool, prompt_logprobs: int | None) -> None:
        prompt = [start, *range(length - 1)]  # prompts of one start share prefixes
        try:
            self.world.add(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, prompt_logprobs=prompt_logprobs)
        except InputError:
            assert length >= self.world.scheduler.max_sequence_tokens

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule()
    def step(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.requests))))

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(data=st.data())
    def abort_while_a_batch_is_on_its_way(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.requests)))
        self.world.step(meanwhile=lambda: self.world.abort(name))

    @rule()
    def change_weights(self) -> None:
        self.world.change_weights()

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule()
    def change_weights_while_a_batch_is_on_its_way(self) -> None:
        self.world.step(meanwhile=self.world.change_weights)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_answers()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase


def test_fault_13_a_prompt_that_the_cache_has_whole_is_answered() -> None:
    world = World()
    for _ in range(3):
        world.add([1] * 8, max_tokens=3, ignore_eos=True)
        world.drain()
    world.check_answers()
    assert world.scheduler.counters.prefix_hits == 2 * 4
    assert world.scheduler.counters.prefix_queries == 3 * 8


def test_fault_14_preemption_of_sequences_that_share_a_prefix() -> None:
    world = World(num_blocks=8, block_size=2, budget=4, context=100)
    for _ in range(3):
        world.add([1, 2, 3, 4, 5], max_tokens=9, ignore_eos=True)
    world.drain()
    world.check_answers()
    assert world.scheduler.counters.preemptions > 0


def test_fault_15_a_prompt_that_cannot_fit_is_refused_with_both_lengths() -> None:
    with pytest.raises(InputError, match=r"got 40 tokens; expected at most 39, which leaves one for the answer"):
        World(context=40).add([1] * 40)
    with pytest.raises(InputError, match=r"got 48 tokens; expected at most 47.*--max-total-tokens"):
        World(context=100).add([1] * 48)
    with pytest.raises(InputError, match=r"at most 47, which leaves one for the answer$"):
        World(context=48).add([1] * 48)
    with pytest.raises(InputError, match="prompt: got no tokens"):
        World().add([])
    world = World(context=40)
    world.add([1] * 39, max_tokens=5, ignore_eos=True)
    world.drain()
    assert [event.finish_reason for event in world.events["r0"]] == ["length"]


def test_fault_17_running_answers_advance_in_every_step_while_a_long_prompt_loads() -> None:
    world = World(num_blocks=40, budget=4, context=100)
    name = world.add([1, 2], max_tokens=30, ignore_eos=True)
    world.step()
    world.add([3] * 60, max_tokens=2)
    for count in range(2, 12):
        batch = world.step()
        assert len(world.answer(name)) == count
        assert [chunk.length for chunk in batch.chunks] == [1, 3]  # the decode first, then what the budget leaves


def test_fault_17_a_prompt_that_waits_for_a_block_is_not_overtaken_by_later_ones() -> None:
    world = World(num_blocks=15, block_size=1, running=5, context=100)
    world.add([9], max_tokens=6, ignore_eos=True)
    world.step()
    name = world.add([1] * 13, max_tokens=1)
    while not world.answer(name):
        world.add([len(world.requests) % 5, 2], max_tokens=2, ignore_eos=True)
        world.step()
        assert len(world.requests) < 20
        assert world.answer(name) or [other for other, events in world.events.items() if events] == ["r0"]
    world.drain()
    world.check_answers()


def test_a_prompt_that_waits_for_a_block_keeps_what_it_has() -> None:
    world = World(num_blocks=5, block_size=4, budget=9, context=100)
    world.add([1] * 6, max_tokens=3, ignore_eos=True)
    world.step()
    name = world.add([2] * 16, max_tokens=1)
    assert [[(chunk.start, chunk.length) for chunk in world.step().chunks] for _ in range(3)] == [
        [(6, 1), (0, 8)],
        [(7, 1)],
        [(8, 8)],
    ]
    assert world.answer(name)
    assert world.scheduler.counters.preemptions == 0
    world.check_answers()


def test_a_prompt_gets_a_token_even_where_decodes_use_up_the_budget() -> None:
    world = World(budget=1)
    world.add([1], max_tokens=9, ignore_eos=True)
    world.step()
    world.add([2] * 5, max_tokens=1)
    assert [[chunk.length for chunk in world.step().chunks] for _ in range(5)] == [[1, 1]] * 5
    world.drain()
    world.check_answers()


def test_an_answer_that_fills_the_cache_alone_ends_with_length() -> None:
    world = World(num_blocks=3, block_size=4, context=1000)
    world.add([1, 2, 3], max_tokens=500, ignore_eos=True)
    world.drain()
    world.check_answers()
    assert world.events["r0"][-1].finish_reason == "length"
    assert len(world.answer("r0")) == 9


def test_arrival_decides_who_is_preempted_and_who_returns_first() -> None:
    world = World(num_blocks=6, block_size=2, budget=20, context=100)
    for start in range(3):
        world.add([start, 1], max_tokens=8, ignore_eos=True)
    ended = list[str]()
    while world.scheduler.has_work:
        world.step()
        ended.extend(name for name, events in world.events.items() if events and events[-1].finish_reason and name not in ended)
    assert ended == ["r0", "r1", "r2"]
    assert world.scheduler.counters.preemptions > 0
    world.check_answers()


def test_no_more_than_the_allowed_number_run() -> None:
    world = World(running=2)
    for _ in range(5):
        world.add([1, 2], max_tokens=3, ignore_eos=True)
    batch = world.step()
    assert len(batch.chunks) == 2
    world.drain()
    world.check_answers()


def test_end_tokens_stop_tokens_and_min_tokens() -> None:
    world = World(num_blocks=60, context=200)
    for start in range(6):
        for params in ({}, {"ignore_eos": True}, {"min_tokens": 4}, {"stop_token_ids": (2,), "ignore_eos": True}):
            world.add([start], max_tokens=20, **params)
    world.drain()
    world.check_answers()
    assert set(world.scheduler.counters.finished) == {"stop", "length"}


def test_prompt_logprobs_arrive_once_whole_and_with_the_first_token() -> None:
    world = World(num_blocks=6, block_size=2, budget=3, context=100)
    world.add([5, 4, 3, 2, 1], max_tokens=6, ignore_eos=True)
    name = world.add([1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    world.drain()
    first, *rest = world.events[name]
    assert [item.token_id for item in first.prompt_logprobs] == [2, 3, 4, 5]
    assert all(event.prompt_logprobs == () for event in rest)
    world.check_answers()


def test_cached_tokens_are_reported() -> None:
    world = World()
    world.add([1] * 10, max_tokens=1)
    world.drain()
    name = world.add([1] * 10, max_tokens=1)
    world.drain()
    assert world.events[name][-1].num_cached_tokens == 8
    name = world.add([1] * 10, max_tokens=5, ignore_eos=True)
    world.step()
    world.abort(name)
    assert [event.num_cached_tokens for event in world.events[name]] == [8, 8]


def test_a_duplicate_id_is_refused_and_an_unknown_one_is_not_aborted() -> None:
    world = World()
    world.add([1], max_tokens=2)
    with pytest.raises(InputError, match="request_id: got r0; expected one that is not in use"):
        world.scheduler.add(world.requests["r0"])
    assert world.scheduler.abort("nobody") is None
    assert world.scheduler.schedule().chunks
    assert World().scheduler.schedule().chunks == ()


def test_a_new_request_with_the_id_of_an_aborted_one_is_not_given_its_result() -> None:
    world = World()
    name = world.add([1, 2, 3], max_tokens=5, ignore_eos=True)

    def replace() -> None:
        world.abort(name)
        world.scheduler.add(world.requests[name])

    world.step(meanwhile=replace)
    assert [event.finish_reason for event in world.events.pop(name)] == ["abort"]
    world.events[name] = []
    world.drain()
    assert world.answer(name) == world.alone(name)[0]


def test_the_audit_finds_a_lost_sequence_and_a_wrong_order() -> None:
    world = World()
    for _ in range(2):
        world.add([1, 2], max_tokens=2)
    for fault in (world.scheduler.waiting.reverse, world.scheduler.waiting.clear):
        fault()
        with pytest.raises(RuntimeError, match="2 are live, or their order is not that of arrival"):
            world.scheduler.check_integrity()


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_abort_frees_at_once(state: str) -> None:
    world = World()
    name = world.add([1] * 20, max_tokens=5)
    if state == "running":
        world.step()
        assert world.manager.num_free_blocks < world.manager.num_blocks
    world.abort(name)
    assert not world.scheduler.has_work
    assert world.manager.num_free_blocks == world.manager.num_blocks
    assert [event.finish_reason for event in world.events[name]] == ["abort"]


def _publish_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = CacheManager.begin

    def planted(self: CacheManager, sequence: Sequence) -> None:
        begin(self, sequence)
        computed = sequence.num_computed_tokens
        self.allocate(sequence, len(sequence.token_ids))
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        self.commit(sequence)
        sequence.num_computed_tokens = computed

    monkeypatch.setattr(CacheManager, "begin", planted)


def _share_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    retain = BlockPool.retain

    def planted(self: BlockPool, block: int) -> None:
        if self._references[block] == 0:
            retain(self, block)

    monkeypatch.setattr(BlockPool, "retain", planted)


def _reuse_without_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "_forget", lambda self, block: None)


def _preempt_without_computing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free = CacheManager.free

    def planted(self: CacheManager, sequence: Sequence) -> None:
        computed = sequence.num_computed_tokens
        free(self, sequence)
        sequence.num_computed_tokens = computed

    monkeypatch.setattr(CacheManager, "free", planted)


@pytest.mark.parametrize(
    "plant", [_publish_too_early, _share_without_a_reference, _reuse_without_forgetting, _preempt_without_computing_again]
)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    plant(monkeypatch)
    world = World(num_blocks=8, block_size=2, budget=4, context=100)
    with pytest.raises((RuntimeError, AssertionError, KeyError, IndexError)):
        _six_turns(world)


def _six_turns(world: World) -> None:
    for turn in range(6):
        for start in range(3):
            world.add([start % 2, 1, 2, 3, 4, 5, turn], max_tokens=6, ignore_eos=True)
        world.drain()
    world.check_answers()
