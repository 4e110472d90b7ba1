"""The block pool: references, reuse in order, and an audit that finds planted faults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eightfold.cache.blocks import BlockPool


def test_blocks_are_handed_out_until_none_is_left() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match="all 3 blocks are held"):
        pool.allocate()


def test_a_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1
    with pytest.raises(RuntimeError, match="block 0 was released once too often"):
        pool.release(block)


def test_a_freed_block_is_found_until_it_is_reused() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"first")
    pool.release(first)
    pool.release(second)
    assert pool.find(b"first") == first
    assert pool.allocate() == second  # without a key it is worth nothing
    assert pool.find(b"first") == first
    assert pool.allocate() == first
    assert pool.find(b"first") is None


def test_the_least_recently_freed_block_goes_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.publish(block, bytes([block]))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.retain(blocks[1])
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_equal_contents_keep_one_block_to_find() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find(b"same") == first
    pool.check_integrity({first: 1, second: 1})


def test_flush_forgets_contents_and_keeps_references() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"x")
    pool.flush()
    assert pool.find(b"x") is None
    pool.check_integrity({block: 1})


def test_the_audit_finds_planted_faults() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.publish(block, b"x")
    with pytest.raises(RuntimeError, match="block 0 counts 1 references and has 2 owners"):
        pool.check_integrity({block: 2})
    pool._free[block] = None
    with pytest.raises(RuntimeError, match="block 0 counts 1 references and is free"):
        pool.check_integrity({block: 1})
    del pool._free[block]
    pool._block_of[b"x"] = 2
    with pytest.raises(RuntimeError, match="block 0 has a key that leads to block 2"):
        pool.check_integrity({block: 1})


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release", "publish", "find"]), st.integers(0, 7)), max_size=80)
)
def test_any_history_balances(history: list[tuple[str, int]]) -> None:
    pool, owners = BlockPool(4), dict.fromkeys(range(4), 0)
    for action, argument in history:
        block = argument % 4
        if action == "allocate" and pool.num_free:
            owners[pool.allocate()] += 1
        elif action == "retain" and owners[block]:
            pool.retain(block)
            owners[block] += 1
        elif action == "release" and owners[block]:
            pool.release(block)
            owners[block] -= 1
        elif action == "publish" and owners[block]:
            pool.publish(block, bytes([argument]))
        elif action == "find" and (found := pool.find(bytes([argument]))) is not None:
            pool.retain(found)
            owners[found] += 1
        pool.check_integrity(owners)
        assert pool.num_free == sum(count == 0 for count in owners.values())
