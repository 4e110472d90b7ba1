"""The tensors of the cache."""

from __future__ import annotations

import torch

from eightfold.cache.pools import KVPool


def test_each_layer_has_its_own_keys_and_values() -> None:
    pool = KVPool(
        num_layers=3, num_blocks=5, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    tensors = [tensor for layer in pool.layers for tensor in layer]
    assert len(tensors) == 6
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in tensors} == {((5, 4, 2, 8), torch.bfloat16)}
    assert pool.block_size == 4
