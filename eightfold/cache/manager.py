"""What the scheduler asks of the cache: room for a sequence's tokens, and blocks of its prompt that are there already.

A block can be found by others only after its tokens were computed (`commit`), so nobody reads what is not written yet. The
last token of a sequence is never taken from the cache: its logits are needed, and only computing it gives them.

A model with recurrent layers also needs the state at the end of a prefix, which is kept at few places: where a chunk of a
prompt ends, so that a prompt that goes on from there does; where keys and values were found and no state with them, since a
second prompt parted there from a first one and a third may; and on the way of an answer, so that the next turn finds it. A
prefix without a state at its end is used as far as the last one that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from eightfold.cache.blocks import BlockPool
from eightfold.cache.prefix import extend_keys
from eightfold.cache.states import StateSlots
from eightfold.types import Sequence, StateSave


class CacheManager:
    """Block tables of sequences over one pool.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        enable_prefix_cache: whether blocks are found again at all.
        states: slots for recurrent states; None for a model without them.
        track_interval: tokens between the states that are kept on the way of an answer, a multiple of `block_size`.

    Attributes:
        states: its slots for recurrent states, for those who watch.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        states: StateSlots | None = None,
        track_interval: int = 256,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self.states = states
        self._track_interval = track_interval
        self._pool = BlockPool(num_blocks, on_forgotten=None if states is None else states.forget)
        self._epoch = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        return self._pool.num_blocks * self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free

    def begin(self, sequence: Sequence) -> None:
        """Give a sequence that holds nothing the longest prefix of full blocks that the cache has, and a slot for its state."""
        sequence.cache_epoch = self._epoch
        if self.states is not None:
            sequence.state_slot = self.states.acquire()
        if not self.enable_prefix_cache or sequence.request.params.prompt_logprobs is not None:
            return
        candidates = (len(sequence.token_ids) - 1) // self.block_size
        extend_keys(sequence.block_keys, sequence.token_ids, self.block_size, candidates)
        found: list[int] = []
        for key in sequence.block_keys[:candidates]:
            block = self._pool.find(key)
            if block is None:
                break
            found.append(block)
        usable = len(found) if self.states is None else self.states.deepest(sequence.block_keys, len(found))
        for block in found[:usable]:
            self._pool.retain(block)
            sequence.block_table.append(block)
        sequence.num_published_blocks = usable
        sequence.num_computed_tokens = usable * self.block_size
        sequence.num_matched_tokens = len(found) * self.block_size

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the sequence's table long enough for its first `num_tokens` tokens: wholly, or not at all and return False."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if missing > self._pool.num_free:
            return False
        sequence.block_table.extend(self._pool.allocate() for _ in range(missing))
        return True

    def restore(self, sequence: Sequence) -> int | None:
        """The slot whose state a sequence that has just begun goes on from; None where it starts from nothing.

        To be copied in the next batch, before that saves anything.
        """
        if self.states is None or not sequence.num_computed_tokens:
            return None
        return self.states.use(sequence.block_keys[sequence.num_computed_tokens // self.block_size - 1])

    def plan_saves(self, sequence: Sequence, length: int) -> tuple[StateSave, ...]:
        """Where to keep the sequence's state while its next `length` tokens are computed, with a slot for each.

        What `commit` or `discard` do not get back stays reserved for ever.
        """
        if self.states is None or not self._may_publish(sequence):
            return ()
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + length
        if sequence.num_remaining_tokens == 1:
            return self._plan_rolling_save(sequence, end) if end % self._track_interval == 0 else ()
        # An equal prompt ends its search a token earlier than one that goes on, and both find the block before that.
        last = end - 1 if length == sequence.num_remaining_tokens else end
        borders = {sequence.num_matched_tokens, last // self.block_size * self.block_size}
        planned = (self._reserve(sequence, position) for position in sorted(borders) if start < position <= end)
        return tuple(save for save in planned if save is not None)

    def commit(self, sequence: Sequence, saves: tuple[StateSave, ...] = ()) -> None:
        """Make blocks that are full of computed tokens findable, and states that were saved with them.

        A sequence that began before the last flush publishes no more: what it computes rests on the keys and values that were
        to be forgotten.
        """
        if not self._may_publish(sequence):
            self.discard(saves)
            return
        full = sequence.num_computed_tokens // self.block_size
        extend_keys(sequence.block_keys, sequence.token_ids, self.block_size, full)
        for index in range(sequence.num_published_blocks, full):
            self._pool.publish(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_published_blocks = max(sequence.num_published_blocks, full)
        if self.states is not None:
            for save in saves:
                self.states.complete(save.slot, sequence.block_keys, save.position // self.block_size)

    def discard(self, saves: tuple[StateSave, ...]) -> None:
        """Take back the slots of states that were planned and are not to be found."""
        if self.states is not None:
            for save in saves:
                self.states.discard(save.slot)

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks, the last ones first, so that a prefix outlives what follows it; and the slot of its state."""
        for block in reversed(sequence.block_table):
            self._pool.release(block)
        sequence.block_table.clear()
        sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_matched_tokens = 0
        sequence.rolling_save = None
        if self.states is not None and sequence.state_slot is not None:
            self.states.release(sequence.state_slot)
            sequence.state_slot = None

    def flush(self) -> None:
        """Forget all contents, as after a change of weights. Running sequences go on with the blocks that they hold."""
        self._pool.flush()
        if self.states is not None:
            self.states.flush()
        self._epoch += 1

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Audit the pool and the tables of all sequences that may hold blocks.

        Raises:
            RuntimeError: naming what does not balance.
        """
        owners: Counter[int] = Counter()
        slots: Counter[int] = Counter()
        for sequence in sequences:
            name, table = sequence.request.request_id, sequence.block_table
            owners.update(table)
            if sequence.state_slot is not None:
                slots[sequence.state_slot] += 1
            elif table and self.states is not None:
                raise RuntimeError(f"{name} holds the blocks {table} and no state slot")
            if len(set(table)) != len(table):
                raise RuntimeError(f"{name} has a block twice in its table {table}")
            if sequence.num_computed_tokens > len(table) * self.block_size:
                raise RuntimeError(f"{name} has computed {sequence.num_computed_tokens} tokens into {len(table)} blocks")
            if (len(table) - 1) * self.block_size >= len(sequence.token_ids):
                raise RuntimeError(f"{name} has {len(sequence.token_ids)} tokens and holds {len(table)} blocks")
            expected: list[bytes] = []
            extend_keys(expected, sequence.token_ids, self.block_size, len(sequence.block_keys))
            if expected != sequence.block_keys:
                raise RuntimeError(f"{name} has keys that are not those of its tokens")
            if sequence.num_published_blocks * self.block_size > sequence.num_computed_tokens:
                raise RuntimeError(f"{name} has published {sequence.num_published_blocks} blocks before they were computed")
            for index, block in enumerate(table):
                # None is right for a published one too: another block has the same contents, or the cache was flushed.
                allowed = (None, *expected[index : index + 1]) if index < sequence.num_published_blocks else (None,)
                if self._pool.key_of(block) not in allowed:
                    raise RuntimeError(f"{name} holds block {block} at index {index}, whose key is not that of its tokens")
        self._pool.check_integrity(owners)
        if self.states is not None:
            self.states.check_integrity(slots)
            if any(self._pool.find(key) is None for key in self.states.checkpoint_keys):
                raise RuntimeError("a state can be found whose keys and values cannot")

    def _may_publish(self, sequence: Sequence) -> bool:
        return self.enable_prefix_cache and sequence.cache_epoch == self._epoch

    def _plan_rolling_save(self, sequence: Sequence, position: int) -> tuple[StateSave, ...]:
        """Keep the newest state of an answer in the place of the one before it."""
        before = sequence.rolling_save
        if before is not None and self.states is not None:
            self.states.retire(before.slot, sequence.block_keys[before.position // self.block_size - 1])
        sequence.rolling_save = self._reserve(sequence, position)
        return () if sequence.rolling_save is None else (sequence.rolling_save,)

    def _reserve(self, sequence: Sequence, position: int) -> StateSave | None:
        num_blocks = position // self.block_size
        extend_keys(sequence.block_keys, sequence.token_ids, self.block_size, num_blocks)
        slot = self.states.reserve(sequence.block_keys, num_blocks) if self.states is not None else None
        return None if slot is None else StateSave(position, slot)
