"""The scheduler in a small world: orders, ends and refusals, and property tests over any mixture of what can happen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eightfold.cache.blocks import BlockPool
from eightfold.cache.manager import CacheManager
from eightfold.cache.states import StateSlots
from eightfold.errors import InputError
from eightfold.types import Sequence
from tests.engine.world import World


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
            self.world.check_nothing_is_left()


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase


class HybridMachine(SchedulerMachine):
    """The same for a model with recurrent states and few checkpoints, where what is kept changes all the time."""

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.integers(1, 4),
        running=st.integers(1, 6),
        budget=st.integers(1, 12),
        checkpoints=st.sampled_from([0, 1, 3, 8]),
        interval=st.integers(1, 3),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def make(
        self,
        num_blocks: int,
        block_size: int,
        running: int,
        budget: int,
        checkpoints: int,
        interval: int,
        prefix_cache: bool,
    ) -> None:
        self.world = World(
            num_blocks=num_blocks,
            block_size=block_size,
            running=running,
            budget=budget,
            checkpoints=checkpoints,
            interval=interval * block_size,
            prefix_cache=prefix_cache,
        )

    @rule(shared=st.integers(0, 12), tail=st.integers(0, 2), length=st.integers(1, 8), max_tokens=st.integers(1, 12))
    def arrive_with_a_fork(self, shared: int, tail: int, length: int, max_tokens: int) -> None:
        self._add([*range(shared), *[tail] * length], max_tokens)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), added=st.integers(0, 4), max_tokens=st.integers(1, 12))
    def go_on_with_a_turn(self, data: st.DataObject, added: int, max_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.requests)))
        self._add([*self.world.requests[name].prompt_token_ids, *self.world.answer(name), *range(added)], max_tokens)

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        if len(prompt) < self.world.scheduler.max_sequence_tokens:
            self.world.add(prompt, max_tokens=max_tokens, ignore_eos=True)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world") and not self.world.manager.enable_prefix_cache:
            assert (self.world.runner.num_restores, self.world.runner.num_saves) == (0, 0)


HybridMachine.TestCase.settings = settings(SchedulerMachine.TestCase.settings, max_examples=300)
TestHybrids = HybridMachine.TestCase


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


def _restore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "restore", lambda self, sequence: None)


def _restore_from_another_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "use", lambda self, key: max(item.slot for item in self._found.values()))


def _begin_where_no_state_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "deepest", lambda self, keys, num_blocks: num_blocks)


def _keep_states_whose_keys_and_values_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "forget", lambda self, key: None)


def _share_state_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateSlots, "acquire", lambda self: 0)
    monkeypatch.setattr(StateSlots, "release", lambda self, slot: None)
    monkeypatch.setattr(StateSlots, "check_integrity", lambda self, owners: None)


def _find_a_state_a_block_early(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = StateSlots.complete

    def planted(self: StateSlots, slot: int, keys: list[bytes], num_blocks: int) -> None:
        early = max(1, num_blocks - 1)
        complete(self, slot, keys, num_blocks if keys[early - 1] in self._found else early)

    monkeypatch.setattr(StateSlots, "complete", planted)


def _find_a_state_before_it_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = StateSlots.reserve

    def planted(self: StateSlots, keys: list[bytes], num_blocks: int) -> int | None:
        slot = reserve(self, keys, num_blocks)
        if slot is not None:
            self.complete(slot, keys, num_blocks)
            self._reserved[slot] = keys[num_blocks - 1]
        return slot

    monkeypatch.setattr(StateSlots, "reserve", planted)


@pytest.mark.parametrize(
    "plant",
    [
        _restore_nothing,
        _restore_from_another_prefix,
        _begin_where_no_state_is,
        _keep_states_whose_keys_and_values_went,
        _share_state_slots,
        _find_a_state_a_block_early,
        _find_a_state_before_it_was_computed,
    ],
)
def test_planted_faults_of_states_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    world = World(num_blocks=8, block_size=2, budget=4, context=100, checkpoints=3, interval=4)
    with pytest.raises((RuntimeError, AssertionError, KeyError, IndexError)):
        _six_turns(world)


@pytest.mark.parametrize("checkpoints", [0, 1, 3])
def test_fault_14_preemption_of_hybrids_that_share_a_prefix(checkpoints: int) -> None:
    world = World(num_blocks=8, block_size=2, budget=4, context=100, checkpoints=checkpoints, interval=4)
    for _ in range(3):
        world.add([1, 2, 3, 4, 5], max_tokens=9, ignore_eos=True)
    world.drain()
    _six_turns(world)
    counters = world.scheduler.counters
    assert counters.preemptions > 0
    assert counters.prefix_tokens_lost > 0
    kept = [world.runner.num_saves > 0, world.runner.num_restores > 0, counters.prefix_hits > 0]
    assert kept == [checkpoints > 0] * 3
    world.check_nothing_is_left()


def test_lost_tokens_count_once_for_each_admission_and_not_while_a_prompt_waits() -> None:
    world = World(num_blocks=8, block_size=4, budget=32, checkpoints=4)
    world.add(list(range(20)), max_tokens=6, ignore_eos=True)
    world.step()
    name = world.add([*range(10), *[50] * 7], max_tokens=1)
    for _ in range(5):
        world.step()
        assert not world.answer(name)
        assert world.scheduler.counters.prefix_queries == 20
        assert world.scheduler.counters.prefix_tokens_lost == 0
    world.drain()
    counters = world.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits, counters.prefix_tokens_lost) == (37, 0, 8)
    third = world.add([*range(10), *[51] * 7], max_tokens=1)
    world.drain()
    assert (counters.prefix_queries, counters.prefix_hits, counters.prefix_tokens_lost) == (54, 8, 8)
    assert world.events[third][-1].num_cached_tokens == 8
    world.check_answers()
    world.check_nothing_is_left()


def test_a_preempted_hybrid_loses_what_has_no_state_each_time_that_it_returns() -> None:
    world = World(num_blocks=7, block_size=2, budget=20, checkpoints=0)
    world.add([1, 2], max_tokens=8, ignore_eos=True)
    world.add([3, 4, 5], max_tokens=8, ignore_eos=True)
    world.drain()
    counters = world.scheduler.counters
    assert counters.preemptions > 0
    assert counters.prefix_queries > 5
    assert counters.prefix_hits == 0
    assert counters.prefix_tokens_lost > 0
    world.check_answers()
    world.check_nothing_is_left()


def test_a_batch_that_an_abort_and_a_flush_overtake_keeps_no_state() -> None:
    world = World(checkpoints=3)
    prompt = [1] * 7

    def abort_and_change_weights() -> None:
        world.abort("r2")
        world.change_weights()

    for overtake in (world.change_weights, lambda: world.abort("r1"), abort_and_change_weights):
        world.add(prompt, max_tokens=2, ignore_eos=True)
        (chunk,) = world.step(meanwhile=overtake).chunks
        assert [save.position for save in chunk.saves] == [4]
        assert world.states is not None
        assert world.states.num_used_checkpoints == 0
        world.drain()
    name = world.add(prompt, max_tokens=2, ignore_eos=True)
    world.drain()
    assert world.events[name][-1].num_cached_tokens == 0
    world.check_answers()
    world.check_nothing_is_left()


def _six_turns(world: World) -> None:
    for turn in range(6):
        for start in range(3):
            world.add([start % 2, 1, 2, 3, 4, 5, turn], max_tokens=6, ignore_eos=True)
        world.drain()
    world.check_answers()
