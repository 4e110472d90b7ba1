"""The books of the KV cache: which block is free, who holds it, and which full block can be found again by its key.

A block that nobody holds stays findable until it is needed for something else, the least recently freed one first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping


class BlockPool:
    """Reference-counted blocks, by number. Every operation is O(1).

    Args:
        num_blocks: how many there are.
        on_forgotten: told each key that leads nowhere any more because its block was taken for something else.
    """

    def __init__(self, num_blocks: int, *, on_forgotten: Callable[[bytes], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self._on_forgotten = on_forgotten
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that are findable included."""
        return len(self._free)

    def allocate(self) -> int:
        """Take the block whose loss costs least, with one reference; its old contents can no longer be found.

        Raises:
            RuntimeError: none is free; callers look at `num_free` first.
        """
        if not self._free:
            raise RuntimeError(f"all {self.num_blocks} blocks are held")
        block, _ = self._free.popitem(last=False)
        key = self._forget(block)
        if key is not None and self._on_forgotten is not None:
            self._on_forgotten(key)
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference, also to a free block that was found by its key."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. The last one frees the block: to be reused late if it can be found, else at once.

        Raises:
            RuntimeError: nobody holds it.
        """
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} was released once too often")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            self._free.move_to_end(block, last=block in self._key_of)

    def publish(self, block: int, key: bytes) -> None:
        """Make a full block that somebody holds findable.

        Where another block has the same contents, that one stays the one to find as long as it is held. A free one hands its
        key over and is reused first, else what is in use would be lost with what is not.
        """
        other = self._block_of.get(key)
        if other is not None and self._references[other]:
            return
        if other is not None:
            self._forget(other)
            self._free.move_to_end(other, last=False)
        self._forget(block)
        self._key_of[block] = key
        self._block_of[key] = block

    def find(self, key: bytes) -> int | None:
        """The block with these contents, held or free."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> bytes | None:
        """The key that leads to this block, where one does."""
        return self._key_of.get(block)

    def flush(self) -> None:
        """Make every block unfindable; references stay."""
        self._key_of.clear()
        self._block_of.clear()

    def check_integrity(self, owners: Mapping[int, int]) -> None:
        """Compare the books with themselves and with the world.

        Args:
            owners: for each held block, how many sequences have it in their tables.

        Raises:
            RuntimeError: naming the block and both counts.
        """
        for block, references in enumerate(self._references):
            if references != owners.get(block, 0):
                raise RuntimeError(f"block {block} counts {references} references and has {owners.get(block, 0)} owners")
            if (references == 0) != (block in self._free):
                raise RuntimeError(f"block {block} counts {references} references and is {'' if references else 'not '}free")
        for block, key in self._key_of.items():
            if self._block_of.get(key) != block:
                raise RuntimeError(f"block {block} has a key that leads to block {self._block_of.get(key)}")
        if len(self._key_of) != len(self._block_of):
            raise RuntimeError(f"{len(self._block_of)} keys lead to {len(self._key_of)} blocks")

    def _forget(self, block: int) -> bytes | None:
        """Make a block unfindable; the key that led to it, where one did."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
        return key
