"""The tensors behind the block numbers: keys and values of every layer."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Paged keys and values.

    Args:
        num_layers: layers that attend.
        num_blocks: blocks; each holds `block_size` tokens of one sequence, in every layer.
        block_size: tokens in a block.
        num_kv_heads: key and value heads.
        head_dim: width of a head.
        dtype: of keys and values.
        device: where they live.

    Attributes:
        block_size: tokens in a block.
        device: where the tensors live.
        layers: for each layer its keys and its values, each `[num_blocks, block_size, num_kv_heads, head_dim]`. Their contents
            are undefined until written, and on a CPU the memory is claimed page by page as that happens.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.device = device
        self.layers: list[tuple[Tensor, Tensor]] = [
            (torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]
