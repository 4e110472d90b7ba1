"""What the scheduler asks of the cache: room for a sequence's tokens, and blocks of its prompt that are there already.

A block can be found by others only after its tokens were computed (`commit`), so nobody reads what is not written yet. The
last token of a sequence is never taken from the cache: its logits are needed, and only computing it gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from eightfold.cache.blocks import BlockPool
from eightfold.cache.prefix import extend_keys
from eightfold.types import Sequence


class CacheManager:
    """Block tables of sequences over one pool.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        enable_prefix_cache: whether blocks are found again at all.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._pool = BlockPool(num_blocks)
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
        """Give a sequence that holds nothing the longest prefix of full blocks that the cache has."""
        sequence.cache_epoch = self._epoch
        if not self.enable_prefix_cache or sequence.request.params.prompt_logprobs is not None:
            return
        candidates = (len(sequence.token_ids) - 1) // self.block_size
        extend_keys(sequence.block_keys, sequence.token_ids, self.block_size, candidates)
        for key in sequence.block_keys[:candidates]:
            block = self._pool.find(key)
            if block is None:
                break
            self._pool.retain(block)
            sequence.block_table.append(block)
        sequence.num_published_blocks = len(sequence.block_table)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the sequence's table long enough for its first `num_tokens` tokens: wholly, or not at all and return False."""
        missing = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if missing > self._pool.num_free:
            return False
        sequence.block_table.extend(self._pool.allocate() for _ in range(missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Make blocks that are full of computed tokens findable.

        A sequence that began before the last flush publishes no more: what it computes rests on the keys and values that were
        to be forgotten.
        """
        if not self.enable_prefix_cache or sequence.cache_epoch != self._epoch:
            return
        full = sequence.num_computed_tokens // self.block_size
        extend_keys(sequence.block_keys, sequence.token_ids, self.block_size, full)
        for index in range(sequence.num_published_blocks, full):
            self._pool.publish(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_published_blocks = max(sequence.num_published_blocks, full)

    def free(self, sequence: Sequence) -> None:
        """Take back all blocks. The last ones are freed first, so that a prefix outlives what follows it."""
        for block in reversed(sequence.block_table):
            self._pool.release(block)
        sequence.block_table.clear()
        sequence.num_published_blocks = 0
        sequence.num_computed_tokens = 0

    def flush(self) -> None:
        """Forget all contents, as after a change of weights. Running sequences go on with the blocks that they hold."""
        self._pool.flush()
        self._epoch += 1

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Audit the pool and the tables of all sequences that may hold blocks.

        Raises:
            RuntimeError: naming what does not balance.
        """
        owners: Counter[int] = Counter()
        for sequence in sequences:
            name, table = sequence.request.request_id, sequence.block_table
            owners.update(table)
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
