"""The books of recurrent states: which slot is whose, and which slots hold a state that others may go on from.

A recurrent layer has one state for all the tokens that it took in, so a prefix can be used again only where its state was kept.
A *checkpoint* is the states of all recurrent layers after a whole number of blocks; it is found by the key of the last of them.

Checkpoints have slots of their own, and all of them have the same size. When these are used up, the one goes that is worth
least by GreedyDual-Size with Frequency (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy", HPL-98-69, 1998; with bypassing as in Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USITS 1997):

    priority = clock when it was made or last used + (1 + times it was used) * blocks that it saves

The blocks that it saves are those between it and the next checkpoint below it on the same path, since without it one would
start there. The clock rises to the priority of whatever goes, also where that is the newcomer, so that what is not used ages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(slots=True, eq=False)
class _Checkpoint:
    """A node in the tree of checkpoints, by the prefixes that they stand for.

    Attributes:
        slot: where the states are.
        keys: block keys of a path that leads through it; it may go on beyond it.
        num_blocks: blocks of its prefix.
        parent: the next one below it on its path.
        children: those whose parent it is.
        age: the clock when it was made or last used.
        hits: times that it was used.
        priority: what it is worth.
    """

    slot: int
    keys: Sequence[bytes]
    num_blocks: int
    parent: _Checkpoint | None
    children: set[_Checkpoint] = field(default_factory=set)
    age: int = 0
    hits: int = 0
    priority: int = 0

    @property
    def key(self) -> bytes:
        return self.keys[self.num_blocks - 1]

    def weigh(self) -> None:
        below = self.parent.num_blocks if self.parent is not None else 0
        self.priority = self.age + (1 + self.hits) * (self.num_blocks - below)


class StateSlots:
    """Slots for the states of running sequences, and after them slots for checkpoints.

    Operations on one checkpoint take a time that grows with its depth and its children; making room for one looks at all.

    Args:
        num_sequences: slots of sequences, numbered from 0.
        num_checkpoints: slots of checkpoints, numbered from there.
    """

    def __init__(self, num_sequences: int, num_checkpoints: int) -> None:
        self.num_sequences = num_sequences
        self.num_checkpoints = num_checkpoints
        self._free_sequences = list(reversed(range(num_sequences)))
        self._free_checkpoints = list(reversed(range(num_sequences, num_sequences + num_checkpoints)))
        self._reserved: dict[int, bytes] = {}
        self._root = _Checkpoint(-1, (), 0, None)
        self._found: dict[bytes, _Checkpoint] = {}
        self._clock = 0

    @property
    def num_used_sequences(self) -> int:
        """Slots that sequences hold."""
        return self.num_sequences - len(self._free_sequences)

    @property
    def num_used_checkpoints(self) -> int:
        """Slots with a checkpoint that can be found, or that a batch on its way writes."""
        return self.num_checkpoints - len(self._free_checkpoints)

    def acquire(self) -> int:
        """A slot for a sequence. What it holds is of no meaning: a sequence starts from zeros or from a checkpoint.

        Raises:
            RuntimeError: all are held; as many sequences may run as there are slots.
        """
        if not self._free_sequences:
            raise RuntimeError(f"all {self.num_sequences} state slots are held")
        return self._free_sequences.pop()

    def release(self, slot: int) -> None:
        """Take back the slot of a sequence."""
        self._free_sequences.append(slot)

    def deepest(self, keys: Sequence[bytes], num_blocks: int) -> int:
        """Blocks of the longest prefix with a checkpoint among the first `num_blocks` of a path; 0 where there is none."""
        return next((length for length in range(num_blocks, 0, -1) if keys[length - 1] in self._found), 0)

    def use(self, key: bytes) -> int:
        """The slot of the checkpoint with this key, which is worth more from now on.

        Its contents are to be copied before the next batch writes any checkpoint; after that the slot may be another's.
        """
        checkpoint = self._found[key]
        checkpoint.hits += 1
        checkpoint.age = self._clock
        checkpoint.weigh()
        return checkpoint.slot

    def reserve(self, keys: Sequence[bytes], num_blocks: int) -> int | None:
        """A slot for a checkpoint after the first `num_blocks` blocks of a path, which the next batch writes.

        Nobody finds it before `complete`. None where there is such a checkpoint already, or on its way, or where all that
        there are are worth more.
        """
        key = keys[num_blocks - 1]
        if key in self._found or key in self._reserved.values():
            return None
        if not self._free_checkpoints and not self._make_room(num_blocks - self.deepest(keys, num_blocks - 1)):
            return None
        slot = self._free_checkpoints.pop()
        self._reserved[slot] = key
        return slot

    def complete(self, slot: int, keys: Sequence[bytes], num_blocks: int) -> None:
        """Make a reserved checkpoint findable: it was computed.

        Args:
            slot: what `reserve` gave.
            keys: block keys of its path. They are kept, so they may be appended to and nothing else.
            num_blocks: blocks of its prefix.
        """
        del self._reserved[slot]
        below = self.deepest(keys, num_blocks - 1)
        parent = self._found[keys[below - 1]] if below else self._root
        made = _Checkpoint(slot, keys, num_blocks, parent, age=self._clock)
        made.children = {
            item for item in parent.children if item.num_blocks > num_blocks and item.keys[num_blocks - 1] == made.key
        }
        parent.children -= made.children
        parent.children.add(made)
        self._found[made.key] = made
        made.weigh()
        for item in made.children:
            item.parent = made
            item.weigh()

    def discard(self, slot: int) -> None:
        """Give up a reserved checkpoint."""
        del self._reserved[slot]
        self._free_checkpoints.append(slot)

    def retire(self, slot: int, key: bytes) -> None:
        """Drop a checkpoint that a later one of the same sequence replaces, unless somebody used it or it is gone already."""
        checkpoint = self._found.get(key)
        if checkpoint is not None and checkpoint.slot == slot and not checkpoint.hits:
            self._drop(checkpoint)

    def forget(self, key: bytes) -> None:
        """Drop the checkpoint with this key, where there is one: the keys and values beside it are gone."""
        if key in self._found:
            self._drop(self._found[key])

    def flush(self) -> None:
        """Drop all checkpoints. Reserved ones stay reserved, for whoever has them to give up."""
        self._free_checkpoints.extend(item.slot for item in self._found.values())
        self._found.clear()
        self._root.children.clear()

    @property
    def checkpoint_keys(self) -> Iterator[bytes]:
        """Keys of all checkpoints that can be found."""
        return iter(self._found)

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Compare the books with themselves and with the world.

        Args:
            owners: for each slot of a sequence that is held, how many sequences hold it.

        Raises:
            RuntimeError: naming what does not balance.
        """
        for slot in {*range(self.num_sequences), *self._free_sequences, *owners}:
            times_free, holders = self._free_sequences.count(slot), owners.get(slot, 0)
            if times_free + holders != int(slot < self.num_sequences):
                raise RuntimeError(f"state slot {slot} is free {times_free} times and has {holders} owners")
        found = [item.slot for item in self._found.values()]
        accounted = sorted([*self._free_checkpoints, *self._reserved, *found])
        if accounted != list(range(self.num_sequences, self.num_sequences + self.num_checkpoints)):
            raise RuntimeError(f"the checkpoint slots that are free, reserved or found are {accounted}")
        for key, item in self._found.items():
            below = self.deepest(item.keys, item.num_blocks - 1)
            parent = self._found[item.keys[below - 1]] if below else self._root
            if item.key != key or item.parent is not parent or item not in parent.children:
                raise RuntimeError(f"checkpoint slot {item.slot} is in the wrong place of the tree")
            if item.priority != item.age + (1 + item.hits) * (item.num_blocks - below) or item.age > self._clock:
                raise RuntimeError(f"checkpoint slot {item.slot} has the priority {item.priority}, not that of its place")
        if sum(len(item.children) for item in (self._root, *self._found.values())) != len(self._found):
            raise RuntimeError("the tree has children that are no checkpoints")

    def _make_room(self, saved: int) -> bool:
        """Drop the checkpoint that is worth least for one that saves `saved` blocks; False where the newcomer is."""
        worst = min(self._found.values(), key=attrgetter("priority"), default=None)
        if worst is None:
            return False
        if worst.priority > self._clock + saved:
            self._clock += saved
            return False
        self._clock = max(self._clock, worst.priority)
        self._drop(worst)
        return True

    def _drop(self, checkpoint: _Checkpoint) -> None:
        del self._found[checkpoint.key]
        self._free_checkpoints.append(checkpoint.slot)
        parent = checkpoint.parent or self._root
        parent.children.discard(checkpoint)
        parent.children |= checkpoint.children
        for item in checkpoint.children:
            item.parent = parent
            item.weigh()
