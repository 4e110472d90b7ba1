"""The tensors behind the numbers: keys and values in blocks, recurrent states in slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eightfold.layers.caches import CacheLayout, LayerCache, StateCache


class CachePool:
    """What all layers of a model keep between steps.

    Contents are undefined until written, and on a CPU the memory is claimed page by page as that happens.

    Args:
        layout: which layers keep what.
        num_blocks: blocks; each holds `block_size` tokens of one sequence, in every layer that attends.
        block_size: tokens in a block.
        num_slots: slots of states, of sequences and of checkpoints together; 0 where no layer recurs.
        dtype: of keys, values and the inputs of the convolutions.
        state_dtype: of the states of the scans.
        device: where they live.

    Attributes:
        block_size: tokens in a block.
        device: where the tensors live.
        layers: what each layer of the model keeps, in their order.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int = 0,
        dtype: torch.dtype,
        state_dtype: torch.dtype = torch.float32,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.device = device
        kv_shape = (num_blocks, block_size, layout.num_kv_heads, layout.head_dim)
        # One tensor for all layers, so that copying slots is one operation.
        self._states: tuple[Tensor, ...] = ()
        states: list[StateCache] = []
        if layout.conv_shape is not None and layout.ssm_shape is not None:
            leading = (sum(layout.recurs), num_slots)
            conv = torch.empty((*leading, *layout.conv_shape), dtype=dtype, device=device)  # [layers, slots, C, kernel - 1]
            ssm = torch.empty((*leading, *layout.ssm_shape), dtype=state_dtype, device=device)  # [layers, slots, H, P, N]
            self._states = (conv, ssm)
            states = [StateCache(*layer) for layer in zip(conv, ssm, strict=True)]
        following = iter(states)
        self.layers: list[LayerCache] = [
            LayerCache(
                (torch.empty(kv_shape, dtype=dtype, device=device), torch.empty(kv_shape, dtype=dtype, device=device))
                if attends
                else None,
                next(following) if recurs else None,
            )
            for attends, recurs in zip(layout.attends, layout.recurs, strict=True)
        ]

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states of all layers from slots to slots. No slot is both, and no target occurs twice."""
        taken = torch.tensor(sources, dtype=torch.int64, device=self.device)
        given = torch.tensor(targets, dtype=torch.int64, device=self.device)
        for states in self._states:
            states.index_copy_(1, given, states.index_select(1, taken))
