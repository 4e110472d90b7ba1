"""What Triton's interpreter can check of the kernels for the small operations; see `interpreted.py`."""

from __future__ import annotations

import os
from unittest import mock

import torch

from tests.conftest import poison
from tests.kernels.test_fused import (
    ROUTINGS,
    check_activations,
    check_gated_norms,
    check_norms,
    check_norms_of_heads,
    check_rotary,
    check_route,
    check_ties,
    check_write_kv,
)

FP32, FP16 = torch.float32, torch.float16


def check_all() -> None:
    for width in (1, 7, 127, 576, 2688):
        check_norms(width, FP32, "cpu")
    check_norms(64, FP16, "cpu")
    check_norms_of_heads(FP32, "cpu")
    check_gated_norms(8, 64, FP32, "cpu")
    check_gated_norms(3, 48, FP16, "cpu")
    for head_dim, rotary_dim in ((64, 64), (80, 48), (128, 128)):
        check_rotary(head_dim, rotary_dim, FP32, "cpu")
    check_activations(3, 1100, FP32, "cpu")
    check_activations(7, 1, FP16, "cpu")
    check_write_kv(3, 80, FP32, "cpu")
    check_write_kv(8, 64, FP16, "cpu")
    for routing in ROUTINGS:
        check_route(routing, 7, 300, FP32, FP32, "cpu")
    check_route(ROUTINGS[2], 70, 1000, FP16, FP32, "cpu")
    check_ties("cpu")


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    torch.manual_seed(0)
    make = torch.empty
    with mock.patch.object(torch, "empty", lambda *sizes, **options: poison(make(*sizes, **options))):
        check_all()
