"""Slots of recurrent states: against a model that looks at everything each time, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eightfold.cache.states import StateSlots


def path(text: str) -> list[bytes]:
    """Keys of a path whose blocks are the letters of `text`: each is the letters so far."""
    return [text[: index + 1].encode() for index in range(len(text))]


def keep(states: StateSlots, text: str) -> int:
    """Make a checkpoint after all blocks of a path."""
    slot = states.reserve(path(text), len(text))
    assert slot is not None
    states.complete(slot, path(text), len(text))
    return slot


def found(states: StateSlots) -> list[str]:
    """The paths that end in a checkpoint."""
    states.check_integrity({})
    return sorted(key.decode() for key in states.checkpoint_keys)


@dataclass
class Kept:
    """What the model knows of a checkpoint."""

    slot: int
    age: int
    hits: int = 0


class NaiveStates:
    """Checkpoints by their paths, with every number computed anew from its definition."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}
        self.clock = 0

    def deepest(self, text: str) -> int:
        return max((len(item) for item in self.kept if text.startswith(item)), default=0)

    def priority(self, text: str) -> int:
        item = self.kept[text]
        return item.age + (1 + item.hits) * (len(text) - self.deepest(text[:-1]))

    def make_room(self, text: str) -> str | None:
        """The checkpoint that goes for a new one at the end of a path; None where the new one is worth less than all others."""
        worth = self.clock + len(text) - self.deepest(text[:-1])
        worst = min(self.kept, key=self.priority, default=None)
        if worst is None:
            return None
        self.clock = max(self.clock, min(worth, self.priority(worst)))
        return worst if self.priority(worst) <= worth else None


texts = st.text("ab", min_size=1, max_size=6)


class StatesMachine(RuleBasedStateMachine):
    """Anything that may happen to slots, in any order, beside the model."""

    @initialize(num_sequences=st.integers(1, 3), num_checkpoints=st.integers(0, 4))
    def make(self, num_sequences: int, num_checkpoints: int) -> None:
        self.states = StateSlots(num_sequences, num_checkpoints)
        self.naive = NaiveStates()
        self.held: set[int] = set()
        self.reserved: dict[str, tuple[int, list[bytes]]] = {}

    @rule()
    def acquire(self) -> None:
        if len(self.held) == self.states.num_sequences:
            with pytest.raises(RuntimeError, match="state slots are held"):
                self.states.acquire()
            return
        slot = self.states.acquire()
        assert slot in set(range(self.states.num_sequences)) - self.held
        self.held.add(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.states.release(slot)
        self.held.remove(slot)

    @rule(text=texts, beyond=st.text("ab", max_size=3))
    def reserve(self, text: str, beyond: str) -> None:
        keys = path(text + beyond)
        slot = self.states.reserve(keys, len(text))
        if text in self.naive.kept or text in self.reserved:
            assert slot is None
            return
        if len(self.naive.kept) + len(self.reserved) == self.states.num_checkpoints:
            gone = self.naive.make_room(text)
            if gone is None:
                assert slot is None
                return
            del self.naive.kept[gone]
        taken = {item.slot for item in self.naive.kept.values()} | {other for other, _ in self.reserved.values()}
        first = self.states.num_sequences
        assert slot in set(range(first, first + self.states.num_checkpoints)) - taken
        self.reserved[text] = slot, keys

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), later=st.text("ab", max_size=3))
    def complete(self, data: st.DataObject, later: str) -> None:
        text = data.draw(st.sampled_from(sorted(self.reserved)))
        slot, keys = self.reserved.pop(text)
        self.states.complete(slot, keys, len(text))
        keys.extend(key for key in path(keys[-1].decode() + later)[len(keys) :])
        self.naive.kept[text] = Kept(slot, self.naive.clock)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slot, _ = self.reserved.pop(data.draw(st.sampled_from(sorted(self.reserved))))
        self.states.discard(slot)

    @precondition(lambda self: self.naive.kept)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from(sorted(self.naive.kept)))
        item = self.naive.kept[text]
        assert self.states.use(text.encode()) == item.slot
        item.hits, item.age = item.hits + 1, self.naive.clock

    @precondition(lambda self: self.states.num_checkpoints)
    @rule(text=texts, offset=st.integers(0, 3), data=st.data())
    def retire(self, text: str, offset: int, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from([text, *sorted(self.naive.kept)]))
        slot = self.states.num_sequences + offset % self.states.num_checkpoints
        self.states.retire(slot, text.encode())
        if text in self.naive.kept and self.naive.kept[text].slot == slot and not self.naive.kept[text].hits:
            del self.naive.kept[text]

    @rule(text=texts)
    def forget(self, text: str) -> None:
        self.states.forget(text.encode())
        self.naive.kept.pop(text, None)

    @rule()
    def flush(self) -> None:
        self.states.flush()
        self.naive.kept.clear()

    @rule(text=texts, num_blocks=st.integers(0, 6))
    def deepest(self, text: str, num_blocks: int) -> None:
        num_blocks = min(num_blocks, len(text))
        assert self.states.deepest(path(text), num_blocks) == self.naive.deepest(text[:num_blocks])

    @invariant()
    def both_know_the_same(self) -> None:
        if hasattr(self, "states"):
            self.states.check_integrity(dict.fromkeys(self.held, 1))
            assert [key.decode() for key in self.states.checkpoint_keys] == list(self.naive.kept)
            assert self.states.num_used_sequences == len(self.held)
            assert self.states.num_used_checkpoints == len(self.naive.kept) + len(self.reserved)
            priorities = {key.decode(): item.priority for key, item in self.states._found.items()}
            assert priorities == {text: self.naive.priority(text) for text in self.naive.kept}


StatesMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
TestStates = StatesMachine.TestCase


def test_every_sequence_has_a_slot_of_its_own_until_all_are_held() -> None:
    states = StateSlots(2, 3)
    assert {states.acquire(), states.acquire()} == {0, 1}
    assert states.num_used_sequences == 2
    with pytest.raises(RuntimeError, match="all 2 state slots are held"):
        states.acquire()
    states.release(1)
    assert states.num_used_sequences == 1
    assert states.acquire() == 1
    states.check_integrity({0: 1, 1: 1})


def test_slots_of_checkpoints_come_after_those_of_sequences() -> None:
    states = StateSlots(2, 3)
    assert {keep(states, "a"), keep(states, "b"), keep(states, "c")} == {2, 3, 4}
    assert states.num_used_checkpoints == 3
    assert states.num_used_sequences == 0


def test_a_checkpoint_is_found_when_it_was_computed_and_not_before() -> None:
    states, keys = StateSlots(1, 2), path("abc")
    slot = states.reserve(keys, 2)
    assert slot is not None
    assert (states.num_used_checkpoints, states.deepest(keys, 3), found(states)) == (1, 0, [])
    assert states.reserve(keys, 2) is None
    assert states.num_used_checkpoints == 1
    states.complete(slot, keys, 2)
    assert (states.num_used_checkpoints, states.deepest(keys, 3), found(states)) == (1, 2, ["ab"])
    assert states.use(b"ab") == slot
    assert states.reserve(keys, 2) is None
    assert states.num_used_checkpoints == 1


def test_a_reserved_slot_that_is_given_up_is_free_again() -> None:
    states = StateSlots(1, 1)
    slot = states.reserve(path("ab"), 2)
    assert slot is not None
    states.discard(slot)
    assert (states.num_used_checkpoints, found(states)) == (0, [])
    assert states.reserve(path("ab"), 2) == slot


@pytest.mark.parametrize(
    ("text", "num_blocks", "expected"),
    [("abcdef", 6, 4), ("abcdef", 4, 4), ("abcdef", 3, 2), ("abcdef", 1, 0), ("abxxxx", 6, 2), ("bbcd", 4, 0), ("abcd", 0, 0)],
)
def test_the_deepest_checkpoint_of_a_path_is_within_its_first_blocks(text: str, num_blocks: int, expected: int) -> None:
    states = StateSlots(1, 3)
    for kept in ("ab", "abcd", "xbcdef"):
        keep(states, kept)
    assert states.deepest(path(text), num_blocks) == expected


def test_the_checkpoint_that_saves_least_goes_first() -> None:
    states = StateSlots(1, 3)
    for kept in ("aaaa", "bb", "ccc"):
        keep(states, kept)
    keep(states, "dddd")
    assert found(states) == ["aaaa", "ccc", "dddd"]
    keep(states, "eeeee")
    assert found(states) == ["aaaa", "dddd", "eeeee"]


def test_a_checkpoint_saves_the_blocks_between_it_and_the_one_below() -> None:
    states = StateSlots(1, 3)
    for kept in ("bb", "aaaaa", "aaaaaa"):
        keep(states, kept)
    keep(states, "cccc")
    assert found(states) == ["aaaaa", "bb", "cccc"]  # the deepest saved one block only


def test_what_lies_above_a_dropped_checkpoint_saves_more_from_then_on() -> None:
    states = StateSlots(1, 3)
    for kept in ("aaa", "aaaaaa", "bbbb"):
        keep(states, kept)
    states.forget(b"aaa")
    keep(states, "ccccc")
    keep(states, "dddddd")
    assert found(states) == ["aaaaaa", "ccccc", "dddddd"]


def test_a_use_counts_as_much_as_the_making() -> None:
    states = StateSlots(1, 2)
    slot = keep(states, "aa")
    keep(states, "bbb")
    assert states.use(b"aa") == slot
    keep(states, "cccc")
    assert found(states) == ["aa", "cccc"]


def test_of_equals_the_one_that_was_made_first_goes_and_the_new_one_stays() -> None:
    states = StateSlots(1, 2)
    for kept in ("aa", "bb", "cc"):
        keep(states, kept)
    assert found(states) == ["bb", "cc"]


def test_what_was_worth_much_and_is_not_used_is_outlived_by_what_came_later() -> None:
    states = StateSlots(1, 2)
    keep(states, "aaaaa")
    for number in range(3):
        keep(states, f"{number}b")  # the clock rises to 0, 2, 4: worth 2, 4, 6
    assert found(states) == ["2b", "aaaaa"]
    keep(states, "cc")
    assert found(states) == ["2b", "cc"]


def test_a_use_brings_a_checkpoint_to_the_present() -> None:
    states = StateSlots(1, 2)
    keep(states, "aaaaa")
    for number in range(3):
        keep(states, f"{number}b")
    states.use(b"aaaaa")
    for number in range(4):
        keep(states, f"{number}c")
    assert "aaaaa" in found(states)


def test_a_newcomer_that_is_worth_less_than_all_is_passed_over_until_time_has_made_it_their_equal() -> None:
    states = StateSlots(1, 2)
    keep(states, "aaaaa")
    keep(states, "bbbbbb")
    assert [states.reserve(path("cc"), 2) for _ in range(2)] == [None, None]
    assert found(states) == ["aaaaa", "bbbbbb"]
    keep(states, "cc")  # 2 + 2 blocks were passed over: now it is worth 6, and the first one 5
    assert found(states) == ["bbbbbb", "cc"]


def test_there_is_no_room_where_all_slots_are_reserved_or_none_exist() -> None:
    assert StateSlots(1, 0).reserve(path("abc"), 3) is None
    states = StateSlots(1, 1)
    assert states.reserve(path("a"), 1) is not None
    assert states.reserve(path("bbbbb"), 5) is None
    assert states.num_used_checkpoints == 1


def test_a_checkpoint_that_a_later_one_replaces_is_dropped() -> None:
    states = StateSlots(1, 2)
    states.retire(keep(states, "ab"), b"ab")
    assert (found(states), states.num_used_checkpoints) == ([], 0)


def test_a_checkpoint_that_was_used_is_not_retired() -> None:
    states = StateSlots(1, 2)
    slot = keep(states, "ab")
    states.use(b"ab")
    states.retire(slot, b"ab")
    assert found(states) == ["ab"]


def test_what_others_made_in_the_place_of_a_checkpoint_is_not_retired() -> None:
    states = StateSlots(1, 2)
    slot = keep(states, "ab")
    states.forget(b"ab")
    states.retire(slot, b"ab")
    keep(states, "x")
    other = keep(states, "ab")
    assert other != slot
    states.retire(slot, b"ab")
    assert found(states) == ["ab", "x"]


def test_forgetting_is_of_one_checkpoint_and_of_none_where_there_is_none() -> None:
    states = StateSlots(1, 3)
    for kept in ("a", "ab", "abc"):
        keep(states, kept)
    states.forget(b"ab")
    states.forget(b"ab")
    states.forget(b"z")
    assert (found(states), states.num_used_checkpoints) == (["a", "abc"], 2)
    assert states.deepest(path("abcd"), 4) == 3


def test_after_a_flush_nothing_is_found_and_what_was_reserved_can_be_given_up() -> None:
    states = StateSlots(1, 3)
    keep(states, "a")
    keep(states, "ab")
    slot = states.reserve(path("abc"), 3)
    assert slot is not None
    states.flush()
    assert (found(states), states.num_used_checkpoints, states.deepest(path("abc"), 3)) == ([], 1, 0)
    states.discard(slot)
    assert states.num_used_checkpoints == 0
    for kept in ("ab", "abc", "b"):
        keep(states, kept)
    assert found(states) == ["ab", "abc", "b"]


def test_a_checkpoint_between_others_takes_over_those_above_it_on_its_path() -> None:
    states = StateSlots(1, 6)
    for kept in ("a", "abcd", "abcx", "az", "abc"):
        keep(states, kept)
    tree = {key.decode(): {child.key.decode() for child in item.children} for key, item in states._found.items()}
    assert tree == {"a": {"abc", "az"}, "abc": {"abcd", "abcx"}, "abcd": set(), "abcx": set(), "az": set()}
    priorities = {key.decode(): item.priority for key, item in states._found.items()}
    assert priorities == {"a": 1, "abc": 2, "abcd": 1, "abcx": 1, "az": 1}
    states.forget(b"abc")
    priorities = {key.decode(): item.priority for key, item in states._found.items()}
    assert priorities == {"a": 1, "abcd": 3, "abcx": 3, "az": 1}
    assert found(states) == ["a", "abcd", "abcx", "az"]


def test_time_does_not_run_backwards_when_a_checkpoint_that_lost_its_worth_goes() -> None:
    states = StateSlots(1, 2)
    keep(states, "aaaaaaaa")
    for number in range(3):
        keep(states, f"{number}b")
    keep(states, "aaaaaaa")  # the clock is at 6 now, and the first one saves a single block from now on
    assert found(states) == ["aaaaaaa", "aaaaaaaa"]
    keep(states, "c")
    assert found(states) == ["aaaaaaa", "c"]
    assert states._found[b"c"].priority == 6 + 1


def _make_later(states: StateSlots, key: bytes) -> None:
    states._found[key].age += 1
    states._found[key].weigh()


Fault = Callable[[StateSlots], object]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda states: states.release(0), "state slot 0 is free 1 times and has 1 owners"),
        (lambda states: states.release(1), "state slot 1 is free 2 times and has 0 owners"),
        (lambda states: states.release(2), "state slot 2 is free 1 times and has 0 owners"),
        (lambda states: states.acquire(), "state slot 1 is free 0 times and has 0 owners"),
        (lambda states: states._free_checkpoints.pop(), r"free, reserved or found are \[2, 3, 4, 5\]"),
        (lambda states: states._free_checkpoints.append(2), r"free, reserved or found are \[2, 2, 3, 4, 5, 6\]"),
        (lambda states: states._reserved.clear(), r"free, reserved or found are \[2, 3, 4, 6\]"),
        (lambda states: setattr(states._found[b"ab"], "slot", 4), r"free, reserved or found are \[2, 4, 4, 5, 6\]"),
        (lambda states: setattr(states._found[b"ab"], "num_blocks", 1), "checkpoint slot 3 is in the wrong place"),
        (lambda states: setattr(states._found[b"ab"], "keys", path("xy")), "checkpoint slot 3 is in the wrong place"),
        (lambda states: states._found.update({b"q": states._found.pop(b"c")}), "checkpoint slot 4 is in the wrong place"),
        (lambda states: setattr(states._found[b"ab"], "parent", states._root), "checkpoint slot 3 is in the wrong place"),
        (lambda states: states._found[b"a"].children.clear(), "checkpoint slot 3 is in the wrong place"),
        (lambda states: states._root.children.add(states._found[b"ab"]), "children that are no checkpoints"),
        (lambda states: states._found[b"ab"].children.add(states._found[b"c"]), "children that are no checkpoints"),
        (lambda states: setattr(states._found[b"ab"], "hits", 1), "checkpoint slot 3 has the priority 1"),
        (lambda states: setattr(states._found[b"c"], "priority", 7), "checkpoint slot 4 has the priority 7"),
        (lambda states: _make_later(states, b"c"), "checkpoint slot 4 has the priority 2"),
    ],
)
def test_the_audit_finds_planted_faults(fault: Fault, message: str) -> None:
    states = StateSlots(2, 5)
    owners = {states.acquire(): 1}
    assert [keep(states, text) for text in ("a", "ab", "c")] == [2, 3, 4]
    assert states.reserve(path("dd"), 2) == 5
    states.check_integrity(owners)
    fault(states)
    with pytest.raises(RuntimeError, match=message):
        states.check_integrity(owners)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ({}, "state slot 1 is free 0 times and has 0 owners"),
        ({1: 2}, "state slot 1 is free 0 times and has 2 owners"),
        ({0: 1, 1: 1}, "state slot 0 is free 1 times and has 1 owners"),
        ({1: 1, 2: 1}, "state slot 2 is free 0 times and has 1 owners"),
    ],
)
def test_the_audit_finds_slots_without_their_one_owner(owners: dict[int, int], message: str) -> None:
    states = StateSlots(2, 1)
    assert (states.acquire(), states.acquire()) == (0, 1)
    states.release(0)
    keep(states, "a")
    states.check_integrity({1: 1})
    with pytest.raises(RuntimeError, match=message):
        states.check_integrity(owners)
