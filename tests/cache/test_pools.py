"""The tensors of the cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from eightfold.cache.pools import CachePool
from eightfold.layers.caches import CacheLayout

CPU = torch.device("cpu")
ATTENTION = CacheLayout(attends=(True, True, True), num_kv_heads=2, head_dim=8, recurs=(False, False, False))
HYBRID = CacheLayout(
    attends=(False, True, False, False),
    num_kv_heads=2,
    head_dim=8,
    recurs=(True, False, False, True),
    conv_shape=(6, 3),
    ssm_shape=(2, 4, 5),
)


def hybrid() -> CachePool:
    return CachePool(HYBRID, num_blocks=5, block_size=4, num_slots=7, dtype=torch.bfloat16, device=CPU)


def test_each_layer_has_its_own_keys_and_values() -> None:
    pool = CachePool(ATTENTION, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    tensors = [tensor for layer in pool.layers for tensor in layer.kv or ()]
    assert len(tensors) == 6
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert {(tuple(tensor.shape), tensor.dtype) for tensor in tensors} == {((5, 4, 2, 8), torch.bfloat16)}
    assert all(layer.state is None for layer in pool.layers)
    assert pool.block_size == 4


def test_layers_keep_what_the_layout_says() -> None:
    pool = hybrid()
    assert [(layer.kv is not None, layer.state is not None) for layer in pool.layers] == [
        (False, True),
        (True, False),
        (False, False),
        (False, True),
    ]
    states = [layer.state for layer in pool.layers if layer.state is not None]
    assert all((state.conv.shape, state.conv.dtype) == ((7, 6, 3), torch.bfloat16) for state in states)
    assert all((state.ssm.shape, state.ssm.dtype) == ((7, 2, 4, 5), torch.float32) for state in states)
    assert all(tensor.is_contiguous() for state in states for tensor in state)
    half = CachePool(
        HYBRID, num_blocks=1, block_size=4, num_slots=1, dtype=torch.float32, state_dtype=torch.bfloat16, device=CPU
    )
    assert half.layers[0].state is not None
    assert (half.layers[0].state.conv.dtype, half.layers[0].state.ssm.dtype) == (torch.float32, torch.bfloat16)


def test_states_take_the_bytes_that_the_layout_counts() -> None:
    pool = hybrid()
    taken = sum(tensor.nbytes for layer in pool.layers for tensor in layer.state or ())
    assert taken == 7 * HYBRID.state_bytes(torch.bfloat16, torch.float32)


def test_copying_states_changes_the_targets_alone_and_in_every_layer() -> None:
    pool = hybrid()
    tensors = [tensor for layer in pool.layers for tensor in layer.state or ()]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 97 + number)
    before = [tensor.clone() for tensor in tensors]
    pool.copy_states([5, 6, 5], [0, 3, 2])
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old[[5, 1, 5, 6, 4, 5, 6]])


def test_copying_nothing_and_a_layout_without_attention() -> None:
    pool = CachePool(
        replace(HYBRID, attends=(False,) * 4), num_blocks=5, block_size=4, num_slots=2, dtype=torch.float32, device=CPU
    )
    pool.copy_states([], [])
    assert all(layer.kv is None for layer in pool.layers)
