"""Block tables, prefix hits, and what must not be found."""

from __future__ import annotations

from typing import Any

import pytest

from eightfold.cache import prefix
from eightfold.cache.manager import CacheManager
from eightfold.cache.prefix import block_key
from eightfold.types import Request, SamplingParams, Sequence


def sequence(tokens: list[int], name: str = "r", **params: Any) -> Sequence:
    return Sequence.start(Request(name, tuple(tokens), SamplingParams(**params), 0))


def compute(manager: CacheManager, item: Sequence, num_tokens: int) -> None:
    assert manager.allocate(item, num_tokens)
    item.num_computed_tokens = num_tokens
    manager.commit(item)


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
