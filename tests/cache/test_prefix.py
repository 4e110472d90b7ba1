"""Keys of blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eightfold.cache.prefix import ROOT, block_key, extend_keys


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_keys_are_equal_exactly_when_all_tokens_up_to_the_block_are(first: list[int], second: list[int]) -> None:
    keys: tuple[list[bytes], list[bytes]] = ([], [])
    for found, tokens in zip(keys, (first, second), strict=True):
        extend_keys(found, tokens, 2, 4)
    for index in range(4):
        same = first[: 2 * index + 2] == second[: 2 * index + 2]
        assert (keys[0][index] == keys[1][index]) is same


def test_a_key_depends_on_its_parent_and_on_the_order_of_tokens() -> None:
    assert block_key(ROOT, [1, 2]) != block_key(block_key(ROOT, [0, 0]), [1, 2])
    assert block_key(ROOT, [1, 2]) != block_key(ROOT, [2, 1])
    assert block_key(ROOT, [1, 2]) == block_key(ROOT, (1, 2))


def test_large_token_ids_do_not_wrap() -> None:
    assert len({block_key(ROOT, [token]) for token in (1, 257, 65537, 2**32 + 1, 2**40 + 1)}) == 5


def test_extending_in_steps_equals_extending_at_once() -> None:
    tokens, at_once, in_steps = list(range(20)), list[bytes](), list[bytes]()
    extend_keys(at_once, tokens, 4, 5)
    for count in (1, 1, 3, 5):
        extend_keys(in_steps, tokens, 4, count)
    assert in_steps == at_once
