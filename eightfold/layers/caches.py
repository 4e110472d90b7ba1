"""What a model keeps between steps: which of its layers need keys and values, which a recurrent state, and of what shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

KVCache: TypeAlias = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""


class StateCache(NamedTuple):
    """Recurrent states of one layer, a slot for each sequence or checkpoint.

    Attributes:
        conv: the last inputs of the convolution, `[num_slots, C, kernel - 1]` in the activation dtype.
        ssm: states of the scan, `[num_slots, H, P, N]` in the state dtype.
    """

    conv: Tensor
    ssm: Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps; either, both or none."""

    kv: KVCache | None = None
    state: StateCache | None = None


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What all layers of a model keep.

    Attributes:
        attends: for each layer, whether it has keys and values.
        num_kv_heads: key and value heads; the same in every layer that attends.
        head_dim: width of a head.
        recurs: for each layer, whether it has a recurrent state.
        conv_shape: channels and kernel - 1; None where no layer recurs, as the next.
        ssm_shape: heads, head width and state width.
    """

    attends: tuple[bool, ...]
    num_kv_heads: int
    head_dim: int
    recurs: tuple[bool, ...]
    conv_shape: tuple[int, int] | None = None
    ssm_shape: tuple[int, int, int] | None = None

    @property
    def has_state(self) -> bool:
        """Whether any layer recurs."""
        return any(self.recurs)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values of one token, over all layers."""
        return 2 * sum(self.attends) * self.num_kv_heads * self.head_dim * dtype.itemsize

    def state_bytes(self, conv_dtype: torch.dtype, ssm_dtype: torch.dtype) -> int:
        """Bytes of the states of one sequence, over all layers; 0 where none recurs."""
        if self.conv_shape is None or self.ssm_shape is None:
            return 0
        conv = torch.Size(self.conv_shape).numel() * conv_dtype.itemsize
        return sum(self.recurs) * (conv + torch.Size(self.ssm_shape).numel() * ssm_dtype.itemsize)
