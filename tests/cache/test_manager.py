"""Block tables, prefix hits, states of hybrid models, and what must not be found."""

from __future__ import annotations

from typing import Any

import pytest

from eightfold.cache import prefix
from eightfold.cache.manager import CacheManager
from eightfold.cache.prefix import block_key
from eightfold.cache.states import StateSlots
from eightfold.types import Request, SamplingParams, Sequence


def sequence(tokens: list[int], name: str = "r", **params: Any) -> Sequence:
    return Sequence.start(Request(name, tuple(tokens), SamplingParams(**params), 0))


def compute(manager: CacheManager, item: Sequence, num_tokens: int) -> list[int]:
    """Do what a step does that computes up to `num_tokens`; the positions at which states were kept."""
    assert manager.allocate(item, num_tokens)
    saves = manager.plan_saves(item, num_tokens - item.num_computed_tokens)
    item.num_computed_tokens = num_tokens
    manager.commit(item, saves)
    return [save.position for save in saves]


def hybrid(num_blocks: int = 32, *, sequences: int = 4, checkpoints: int = 8, **options: Any) -> CacheManager:
    """Books with blocks of four tokens, and states."""
    return CacheManager(num_blocks, 4, states=StateSlots(sequences, checkpoints), **{"track_interval": 8, **options})


def slots_of(manager: CacheManager) -> StateSlots:
    assert manager.states is not None
    return manager.states


def admit(manager: CacheManager, tokens: list[int], name: str = "r", **params: Any) -> Sequence:
    item = sequence(tokens, name, **params)
    manager.begin(item)
    return item


def answer(manager: CacheManager, item: Sequence, tokens: list[int]) -> list[int]:
    """Decode: each token is appended when the one before it was computed. Positions at which states were kept."""
    positions = list[int]()
    for token in tokens:
        item.token_ids.append(token)
        positions += compute(manager, item, len(item.token_ids))
    return positions


def check(manager: CacheManager, *items: Sequence) -> None:
    manager.check_integrity(items)
    assert slots_of(manager).num_used_sequences == len(items)


def test_a_computed_prefix_is_found_and_shared() -> None:
    manager = CacheManager(8, 4)
    first, second = sequence(list(range(10)), "a"), sequence([*range(8), 99, 98], "b")
    manager.begin(first)
    compute(manager, first, 10)
    manager.begin(second)
    assert second.block_table == first.block_table[:2]
    assert second.num_computed_tokens == 8
    manager.check_integrity([first, second])
    manager.free(first)
    assert manager.num_free_blocks == 8 - 2
    manager.check_integrity([second])


def test_nothing_is_found_before_it_was_computed() -> None:
    manager = CacheManager(8, 4)
    first, second = sequence(list(range(10)), "a"), sequence(list(range(10)), "b")
    manager.begin(first)
    assert manager.allocate(first, 10)
    first.num_computed_tokens = 6
    manager.commit(first)
    manager.begin(second)
    assert second.block_table == first.block_table[:1]


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_fault_13_the_last_token_is_always_computed(length: int) -> None:
    manager = CacheManager(8, 4)
    first, second = sequence(list(range(length)), "a"), sequence(list(range(length)), "b")
    manager.begin(first)
    compute(manager, first, length)
    manager.begin(second)
    assert second.num_computed_tokens == (length - 1) // 4 * 4
    assert second.num_remaining_tokens >= 1


def test_generated_tokens_serve_the_next_turn() -> None:
    manager = CacheManager(8, 4)
    first = sequence([1, 2, 3], "a")
    manager.begin(first)
    compute(manager, first, 3)
    for token in (4, 5, 6):
        first.token_ids.append(token)
        compute(manager, first, len(first.token_ids) - 1)
    manager.free(first)
    second = sequence([1, 2, 3, 4, 5, 6, 7], "b")
    manager.begin(second)
    assert second.num_computed_tokens == 4


def test_prompt_logprobs_need_every_token() -> None:
    manager = CacheManager(8, 4)
    first, second = sequence(list(range(9)), "a"), sequence(list(range(9)), "b", prompt_logprobs=1)
    manager.begin(first)
    compute(manager, first, 9)
    manager.begin(second)
    assert second.num_computed_tokens == 0


def test_without_a_prefix_cache_and_after_a_flush_nothing_is_found() -> None:
    for manager in (CacheManager(8, 4, enable_prefix_cache=False), CacheManager(8, 4)):
        first, second = sequence(list(range(9)), "a"), sequence(list(range(9)), "b")
        manager.begin(first)
        compute(manager, first, 9)
        if manager.enable_prefix_cache:
            manager.flush()
        else:
            assert first.block_keys == []
        manager.begin(second)
        assert second.num_computed_tokens == 0
        manager.check_integrity([first, second])


def test_what_rests_on_forgotten_blocks_is_not_published() -> None:
    manager = CacheManager(8, 4)
    old, new, last = sequence(list(range(13)), "a"), sequence([*range(4), 99], "b"), sequence(list(range(13)), "c")
    manager.begin(old)
    compute(manager, old, 4)
    manager.flush()
    compute(manager, old, 13)
    manager.begin(new)
    compute(manager, new, 5)
    manager.begin(last)
    assert last.block_table == new.block_table[:1]
    manager.check_integrity([old, new, last])
    manager.free(old)
    manager.begin(old)
    assert old.block_table == new.block_table[:1]
    compute(manager, old, 13)
    assert old.num_published_blocks == 3


def test_a_token_is_hashed_once_however_often_its_sequence_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[int]()

    def counting(parent: bytes, token_ids: list[int]) -> bytes:
        hashed.extend(token_ids)
        return block_key(parent, token_ids)

    monkeypatch.setattr(prefix, "block_key", counting)
    manager, item = CacheManager(8, 4), sequence(list(range(16)), "a")
    for _ in range(3):
        manager.begin(item)
        for num_tokens in range(item.num_computed_tokens + 1, 17):
            compute(manager, item, num_tokens)
        manager.free(item)
    assert hashed == list(range(16))


def test_allocation_is_all_or_nothing() -> None:
    manager = CacheManager(2, 4)
    first = sequence(list(range(20)), "a")
    assert not manager.allocate(first, 9)
    assert first.block_table == []
    assert manager.allocate(first, 8)
    assert manager.num_free_blocks == 0


def test_the_end_of_a_prefix_is_lost_before_its_beginning() -> None:
    manager = CacheManager(4, 4)
    first = sequence(list(range(13)), "a")
    manager.begin(first)
    compute(manager, first, 13)
    manager.free(first)
    other = sequence([50, 51, 52, 53, 54], "b")
    compute(manager, other, 5)
    again = sequence(list(range(13)), "c")
    manager.begin(again)
    assert again.num_computed_tokens == 8


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda item: item.block_table.append(item.block_table[0]), "has a block twice"),
        (lambda item: item.block_table.pop(), "has computed 9 tokens into 2 blocks"),
        (lambda item: item.token_ids.__setitem__(1, 77), "has keys that are not those of its tokens"),
        (lambda item: setattr(item, "num_published_blocks", 3), "has published 3 blocks before they were computed"),
        (lambda item: item.block_table.append(7), "has 9 tokens and holds 4 blocks"),
        (lambda item: item.block_table.__setitem__(0, 7), "references"),
        (lambda item: item.block_table.reverse(), "whose key is not that of its tokens"),
        (lambda item: setattr(item, "num_published_blocks", 1), "whose key is not that of its tokens"),
    ],
)
def test_the_audit_finds_planted_faults(fault: Any, message: str) -> None:
    manager = CacheManager(8, 4)
    item = sequence(list(range(9)), "a")
    manager.begin(item)
    compute(manager, item, 9)
    manager.check_integrity([item])
    fault(item)
    with pytest.raises(RuntimeError, match=message):
        manager.check_integrity([item])


def test_the_audit_finds_a_block_that_is_findable_before_it_was_computed() -> None:
    manager, item = CacheManager(8, 4), sequence(list(range(9)), "a")
    manager.begin(item)
    assert manager.allocate(item, 9)
    manager.check_integrity([item])
    manager._pool.publish(item.block_table[0], block_key(prefix.ROOT, range(4)))
    with pytest.raises(RuntimeError, match="a holds block 0 at index 0, whose key is not that of its tokens"):
        manager.check_integrity([item])


def test_a_prefix_is_used_as_far_as_a_state_was_kept() -> None:
    manager = hybrid()
    first = admit(manager, list(range(14)), "a")
    assert compute(manager, first, 14) == [12]
    second = admit(manager, [*range(10), 99, 98, 97], "b")
    assert (second.num_computed_tokens, second.num_matched_tokens) == (0, 8)
    assert (second.block_table, manager.restore(second)) == ([], None)
    third = admit(manager, [*range(14), 99], "c")
    assert (third.num_computed_tokens, third.num_matched_tokens) == (12, 12)
    assert third.block_table == first.block_table[:3]
    check(manager, first, second, third)


def test_a_sequence_goes_on_from_the_state_at_the_end_of_its_prefix_and_writes_its_own() -> None:
    manager = hybrid()
    first = admit(manager, list(range(14)), "a")
    assert manager.restore(first) is None
    assert manager.allocate(first, 14)
    (save,) = manager.plan_saves(first, 14)
    first.num_computed_tokens = 14
    manager.commit(first, (save,))
    second, third = (admit(manager, list(range(14)), name) for name in "bc")
    assert manager.restore(second) == manager.restore(third) == save.slot
    assert sorted([first.state_slot, second.state_slot, third.state_slot], key=str) == [0, 1, 2]
    assert save.slot in range(4, 4 + 8)


@pytest.mark.parametrize(
    ("budget", "expected"), [(14, [[12]]), (6, [[4], [12], []]), (4, [[4], [8], [12], []]), (3, [[], [4], [8], [12], []])]
)
def test_states_are_kept_where_chunks_of_a_prompt_end(budget: int, expected: list[list[int]]) -> None:
    manager = hybrid()
    item = admit(manager, list(range(14)))
    ends = [*range(budget, 14, budget), 14]
    assert [compute(manager, item, end) for end in ends] == expected
    check(manager, item)


@pytest.mark.parametrize(("length", "kept"), [(16, [12]), (17, [16])])
def test_an_equal_prompt_and_one_that_goes_on_find_the_same_state(length: int, kept: list[int]) -> None:
    manager = hybrid()
    assert compute(manager, admit(manager, list(range(length)), "a"), length) == kept
    for tail in ([], [99]):
        assert admit(manager, [*range(length), *tail], "b").num_computed_tokens == kept[0]


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_fault_13_the_last_token_of_a_hybrid_is_always_computed(length: int) -> None:
    manager = hybrid()
    for name in "abc":
        item = admit(manager, list(range(length)), name)
        expected = 0 if name == "a" else (length - 1) // 4 * 4
        assert (item.num_computed_tokens, item.num_matched_tokens) == (expected, expected)
        assert item.num_remaining_tokens >= 1
        compute(manager, item, length)
        manager.free(item)
    check(manager)


def test_fault_14_a_preempted_hybrid_goes_on_from_a_kept_state_into_a_slot_that_is_its_own_again() -> None:
    manager = hybrid(8, sequences=2)
    first, second = (admit(manager, list(range(10)), name) for name in "ab")
    assert compute(manager, first, 10) == [8]
    assert compute(manager, second, 6) == [4]
    second.num_preemptions += 1
    manager.free(second)
    check(manager, first)
    assert (second.num_computed_tokens, second.num_matched_tokens, second.state_slot) == (0, 0, None)
    other = admit(manager, [7, 7, 7, 7, 7], "c")
    with pytest.raises(RuntimeError, match="all 2 state slots are held"):
        manager.begin(second)
    manager.free(other)
    second.token_ids.append(3)
    manager.begin(second)
    assert (second.num_computed_tokens, second.num_matched_tokens) == (8, 8)
    assert second.block_table == first.block_table[:2]
    assert second.state_slot not in (None, first.state_slot)
    assert manager.restore(second) in range(2, 2 + 8)
    check(manager, first, second)


def test_where_a_second_prompt_parts_from_a_first_a_third_goes_on() -> None:
    manager = hybrid()
    assert compute(manager, admit(manager, list(range(21)), "a"), 21) == [20]
    second = admit(manager, [*range(10), *[90] * 11], "b")
    assert (second.num_computed_tokens, second.num_matched_tokens) == (0, 8)
    assert compute(manager, second, 21) == [8, 20]
    third = admit(manager, [*range(10), *[80] * 11], "c")
    assert (third.num_computed_tokens, third.num_matched_tokens) == (8, 8)
    assert compute(manager, third, 21) == [20]


def test_a_fork_gets_its_state_in_the_chunk_that_reaches_it() -> None:
    manager = hybrid()
    compute(manager, admit(manager, list(range(21)), "a"), 21)
    second = admit(manager, [*range(17), *[90] * 8], "b")
    assert second.num_matched_tokens == 16
    assert [compute(manager, second, end) for end in (9, 15, 23, 25)] == [[8], [12], [16, 20], [24]]


def test_an_answer_keeps_the_newest_state_on_its_way_and_no_other() -> None:
    manager = hybrid()
    item = admit(manager, [1, 2, 3])
    compute(manager, item, 3)
    for count in range(22):
        answer(manager, item, [count])
        newest = item.num_computed_tokens // 8 * 8
        assert slots_of(manager).num_used_checkpoints == (1 if newest else 0)
        assert slots_of(manager).deepest(item.block_keys, len(item.block_keys)) * 4 == newest
        check(manager, item)
    assert newest == 24


def test_the_next_turn_goes_on_from_the_newest_state_of_the_answer() -> None:
    manager = hybrid()
    first = admit(manager, [1, 2, 3], "a")
    compute(manager, first, 3)
    assert answer(manager, first, list(range(10, 24))) == [8, 16]
    manager.free(first)
    second = admit(manager, [*first.token_ids, 5, 6, 7], "b")
    assert (second.num_computed_tokens, second.num_matched_tokens) == (16, 16)


def test_a_state_of_an_answer_that_somebody_used_is_not_replaced() -> None:
    manager = hybrid()
    first = admit(manager, [1, 2, 3], "a")
    compute(manager, first, 3)
    answer(manager, first, list(range(10, 16)))
    other = admit(manager, first.token_ids[:9], "b")
    assert other.num_computed_tokens == 8
    manager.restore(other)
    answer(manager, first, list(range(16, 24)))
    assert slots_of(manager).num_used_checkpoints == 2
    assert [slots_of(manager).deepest(first.block_keys, depth) for depth in (3, 4)] == [2, 4]


def test_the_last_state_of_a_prompt_is_not_replaced_by_those_of_its_answer() -> None:
    manager = hybrid()
    item = admit(manager, list(range(14)))
    compute(manager, item, 14)
    answer(manager, item, list(range(12)))
    assert [slots_of(manager).deepest(item.block_keys, depth) for depth in (5, 6)] == [3, 6]


def test_a_state_goes_with_the_keys_and_values_beside_it() -> None:
    manager = hybrid(4)
    first = admit(manager, list(range(14)), "a")
    compute(manager, first, 6)
    compute(manager, first, 14)
    manager.free(first)
    assert slots_of(manager).num_used_checkpoints == 2
    other = admit(manager, [50] * 5, "b")
    assert manager.allocate(other, 5)  # the block without a key goes first, and then the last one of the prefix
    assert slots_of(manager).num_used_checkpoints == 1
    check(manager, other)
    again = admit(manager, list(range(14)), "c")
    assert (again.num_computed_tokens, again.num_matched_tokens) == (4, 8)
    check(manager, other, again)


def test_a_state_without_the_keys_and_values_of_its_whole_prefix_is_not_found() -> None:
    manager = hybrid(8)
    first = admit(manager, list(range(14)), "a")
    compute(manager, first, 14)
    manager.free(first)
    lost = manager._pool.find(block_key(prefix.ROOT, range(4)))
    assert lost is not None
    manager._pool._free.move_to_end(lost, last=False)
    other = admit(manager, [50], "b")
    assert manager.allocate(other, 1)
    assert other.block_table == [lost]
    again = admit(manager, list(range(14)), "c")
    assert (again.num_computed_tokens, again.num_matched_tokens, manager.restore(again)) == (0, 0, None)
    check(manager, other, again)


def test_a_state_stays_where_another_block_takes_over_the_key() -> None:
    manager = hybrid()
    first, second = (admit(manager, list(range(6)), name) for name in "ab")
    assert compute(manager, first, 6) == [4]
    manager.free(first)
    assert compute(manager, second, 6) == []  # it is there already
    third = admit(manager, list(range(6)), "c")
    assert (third.num_computed_tokens, third.block_table) == (4, second.block_table[:1])
    check(manager, second, third)


def test_two_equal_prompts_of_one_batch_keep_one_state() -> None:
    manager = hybrid()
    items = [admit(manager, list(range(6)), name) for name in "ab"]
    assert all(manager.allocate(item, 6) for item in items)
    planned = [manager.plan_saves(item, 6) for item in items]
    assert [[save.position for save in saves] for saves in planned] == [[4], []]
    for item, saves in zip(items, planned, strict=True):
        item.num_computed_tokens = 6
        manager.commit(item, saves)
    assert slots_of(manager).num_used_checkpoints == 1
    check(manager, *items)


def test_a_state_is_found_when_it_was_computed_and_not_before() -> None:
    manager = hybrid()
    first = admit(manager, list(range(6)), "a")
    assert manager.allocate(first, 6)
    (save,) = manager.plan_saves(first, 6)
    assert admit(manager, list(range(6)), "b").num_matched_tokens == 0
    first.num_computed_tokens = 6
    manager.commit(first, (save,))
    assert admit(manager, list(range(6)), "c").num_computed_tokens == 4


def test_planned_states_that_are_not_wanted_give_their_slots_back() -> None:
    manager = hybrid()
    item = admit(manager, list(range(6)))
    assert manager.allocate(item, 6)
    saves = manager.plan_saves(item, 6)
    assert slots_of(manager).num_used_checkpoints == 1
    manager.discard(saves)
    assert slots_of(manager).num_used_checkpoints == 0
    assert admit(manager, list(range(6)), "b").num_matched_tokens == 0
    CacheManager(8, 4).discard(saves)


def test_after_a_flush_older_sequences_keep_no_states_and_newer_ones_do() -> None:
    manager = hybrid()
    old = admit(manager, list(range(14)), "a")
    assert compute(manager, old, 6) == [4]
    assert manager.allocate(old, 10)
    planned = manager.plan_saves(old, 4)
    assert [save.position for save in planned] == [8]
    manager.flush()
    old.num_computed_tokens = 10
    manager.commit(old, planned)
    assert slots_of(manager).num_used_checkpoints == 0
    assert compute(manager, old, 14) == []
    assert answer(manager, old, list(range(6))) == []
    new = admit(manager, list(range(14)), "b")
    assert (new.num_computed_tokens, new.num_matched_tokens) == (0, 0)
    assert compute(manager, new, 14) == [12]
    check(manager, old, new)


def test_after_a_flush_and_a_preemption_a_sequence_keeps_states_again() -> None:
    manager = hybrid()
    item = admit(manager, list(range(14)))
    compute(manager, item, 14)
    assert answer(manager, item, [5, 6]) == [16]
    manager.flush()
    manager.free(item)
    manager.begin(item)
    assert (item.num_computed_tokens, item.rolling_save) == (0, None)
    assert compute(manager, item, 16) == [12]
    check(manager, item)


def test_without_a_prefix_cache_no_state_is_kept() -> None:
    manager = hybrid(enable_prefix_cache=False)
    for name in "ab":
        item = admit(manager, list(range(14)), name)
        assert (item.num_computed_tokens, item.num_matched_tokens, manager.restore(item)) == (0, 0, None)
        assert item.state_slot is not None
        assert compute(manager, item, 14) == []
        assert answer(manager, item, list(range(10))) == []
        manager.free(item)
    assert slots_of(manager).num_used_checkpoints == 0
    check(manager)


def test_prompt_logprobs_need_every_state_and_the_next_prompt_may_use_them() -> None:
    manager = hybrid()
    compute(manager, admit(manager, list(range(9)), "a"), 9)
    second = admit(manager, list(range(9)), "b", prompt_logprobs=1)
    assert (second.num_computed_tokens, second.num_matched_tokens) == (0, 0)
    assert manager.restore(second) is None
    third = admit(manager, [7, *range(9)], "c", prompt_logprobs=1)
    assert compute(manager, third, 10) == [8]
    assert admit(manager, [7, *range(9)], "d").num_computed_tokens == 8


def test_without_checkpoints_a_hybrid_uses_no_prefix_and_tells_what_it_lost() -> None:
    manager = hybrid(checkpoints=0)
    for name, matched in (("a", 0), ("b", 12)):
        item = admit(manager, list(range(14)), name)
        assert (item.num_computed_tokens, item.num_matched_tokens) == (0, matched)
        assert compute(manager, item, 14) == []
        check(manager, item)
        manager.free(item)


def test_a_model_without_states_has_no_slots_and_loses_nothing() -> None:
    manager = CacheManager(8, 4, track_interval=4)
    first = admit(manager, list(range(14)), "a")
    assert (first.state_slot, manager.plan_saves(first, 14)) == (None, ())
    compute(manager, first, 14)
    second = admit(manager, list(range(14)), "b")
    assert second.num_computed_tokens == second.num_matched_tokens == 12
    assert manager.restore(second) is None


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda manager, item: setattr(item, "state_slot", None), "a holds the blocks .* and no state slot"),
        (lambda manager, item: setattr(item, "state_slot", 1), "state slot [01] is free"),
        (lambda manager, item: slots_of(manager).release(item.state_slot), "state slot 0 is free 1 times and has 1 owners"),
        (lambda manager, item: manager._pool.flush(), "a state can be found whose keys and values cannot"),
        (lambda manager, item: slots_of(manager)._found.popitem(), "the checkpoint slots that are free, reserved or found"),
    ],
)
def test_the_audit_finds_planted_faults_of_states(fault: Any, message: str) -> None:
    manager = hybrid()
    item = admit(manager, list(range(9)), "a")
    compute(manager, item, 9)
    check(manager, item)
    fault(manager, item)
    with pytest.raises(RuntimeError, match=message):
        manager.check_integrity([item])


def test_the_audit_finds_two_sequences_in_one_state_slot() -> None:
    manager = hybrid()
    first, second = (admit(manager, [1, 2], name) for name in "ab")
    assert (first.state_slot, second.state_slot) == (0, 1)
    second.state_slot = 0
    with pytest.raises(RuntimeError, match="state slot 0 is free 0 times and has 2 owners"):
        manager.check_integrity([first, second])
