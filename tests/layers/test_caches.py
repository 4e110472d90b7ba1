"""What a model keeps: bytes by hand."""

from __future__ import annotations

import torch

from eightfold.layers.caches import CacheLayout, LayerCache

HYBRID = CacheLayout((False, True, False), 2, 16, (True, False, False), (96, 3), (8, 12, 20))


def test_bytes_of_keys_and_values_count_the_layers_that_attend() -> None:
    assert HYBRID.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 16 * 2
    assert CacheLayout((True,) * 5, 2, 16, (False,) * 5).kv_bytes_per_token(torch.float32) == 5 * 2 * 2 * 16 * 4


def test_bytes_of_states_count_the_layers_that_recur() -> None:
    assert HYBRID.has_state
    assert HYBRID.state_bytes(torch.bfloat16, torch.float32) == 96 * 3 * 2 + 8 * 12 * 20 * 4


def test_a_model_that_only_attends_has_no_state() -> None:
    layout = CacheLayout((True,), 2, 16, (False,))
    assert (layout.has_state, layout.state_bytes(torch.float32, torch.float32)) == (False, 0)


def test_a_layer_keeps_nothing_unless_it_says_so() -> None:
    assert (LayerCache().kv, LayerCache().state) == (None, None)
