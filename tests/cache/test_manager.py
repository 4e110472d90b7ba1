"""Block tables, prefix hits, and what must not be found."""

from __future__ import annotations

from typing import Any

import pytest

from eightfold.cache.manager import CacheManager
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
        manager.begin(second)
        assert second.num_computed_tokens == 0
        manager.check_integrity([first, second])


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
        (lambda item: item.block_table.__setitem__(0, 7), "references"),
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
