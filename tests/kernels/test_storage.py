"""The memory that weights live in."""

from __future__ import annotations

import gc

import pytest
import torch

from eightfold.kernels import storage
from eightfold.kernels.storage import Arena

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


def test_tensors_do_not_overlap_and_begin_at_cache_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SLAB_BYTES", 1 << 16)
    arena, made = Arena(CPU), []
    for index in range(200):
        tensor = arena.empty((1 + index % 7, 33 + index), DTYPES[index % 4])
        assert tensor.is_contiguous()
        assert tensor.shape == (1 + index % 7, 33 + index)
        assert tensor.dtype == DTYPES[index % 4]
        assert tensor.data_ptr() % 64 == 0
        tensor.view(torch.uint8).fill_(index)
        made.append(tensor)
    assert all(bool((tensor.view(torch.uint8) == index).all()) for index, tensor in enumerate(made))


def test_a_large_tensor_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SLAB_BYTES", 1 << 16)
    arena = Arena(CPU)
    small, large, next_small = (arena.empty((size,), torch.uint8) for size in (100, 1 << 20, 100))
    assert next_small.data_ptr() - small.data_ptr() == 128
    assert large.fill_(1).sum() == 1 << 20


def test_tensors_outlive_their_arena() -> None:
    tensor = Arena(CPU).empty((1000,), torch.float32).fill_(7.0)
    gc.collect()
    assert float(tensor.sum()) == 7000.0


def test_nothing_and_other_devices() -> None:
    assert Arena(CPU).empty((0, 5), torch.float32).shape == (0, 5)
    assert Arena(torch.device("meta")).empty((3, 5), torch.bfloat16).device.type == "meta"
