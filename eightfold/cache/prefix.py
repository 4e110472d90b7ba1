"""Keys of full blocks. A key stands for a block's tokens and for all tokens before them, so equal keys mean equal caches.

Keys are cryptographic digests: with a weaker hash, two prompts made to collide would read each other's cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT = b""
"""The key before the first block."""

_DIGEST_BYTES = 16


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block that holds `token_ids` and follows the block with the key `parent`, or ROOT."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def extend_keys(keys: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int) -> None:
    """Append to `keys` until they cover the first `num_blocks` full blocks of `token_ids`."""
    for index in range(len(keys), num_blocks):
        block = token_ids[index * block_size : (index + 1) * block_size]
        keys.append(block_key(keys[-1] if keys else ROOT, block))
