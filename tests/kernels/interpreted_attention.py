"""What Triton's interpreter can check of the kernels for attention; see `interpreted.py`."""

from __future__ import annotations

import os
from unittest import mock

import torch

from eightfold.kernels.cuda_attention import TritonAttention
from eightfold.kernels.paged_attention import DecodeTile
from eightfold.kernels.paged_prefill import PrefillTile
from eightfold.kernels.reference import ReferenceAttention
from tests.conftest import poison
from tests.kernels.attention_cases import TOLERANCES, attend_exactly, make_case
from tests.kernels.test_paged_attention import check_decode
from tests.kernels.test_paged_prefill import check_prefill
from tests.oracle import assert_matches

MIXED = [(1, 70), (5, 5), (1, 33), (13, 30), (3, 90), (1, 1), (40, 100)]
# Heads, kv heads, width, block size, window.
SHAPES = [
    (8, 2, 64, 16, None),
    (7, 1, 80, 16, None),
    (3, 3, 96, 8, 20),
    (32, 1, 128, 16, None),
    (16, 1, 256, 32, 5),
    (4, 4, 7, 4, None),
    (6, 2, 64, 16, 1),
]


def check_shapes() -> None:
    for num_heads, num_kv_heads, head_dim, block_size, window in SHAPES:
        case = make_case(MIXED, num_heads, num_kv_heads, head_dim, block_size=block_size, window=window)
        check_decode(case, DecodeTile(16, 2, 4), 2, overlap=False)
        check_prefill(case, PrefillTile(32, 16, 2, 4), overlap=False)


def check_parts() -> None:
    for window in (None, 600):
        case = make_case([(1, 1), (1, 1100), (2, 300), (1, 127), (1, 257)], 4, 2, 64, window=window)
        for parts in range(1, 9):
            check_decode(case, DecodeTile(64, 3, 4), parts, overlap=False)


def check_dtypes() -> None:
    case = make_case(MIXED, 4, 2, 64, dtype=torch.float16)
    check_decode(case, DecodeTile(32, 2, 4), 1, overlap=False)
    check_prefill(case, PrefillTile(16, 32, 2, 4), overlap=False)


def check_backend() -> None:
    for chunks in (MIXED, [(1, 300), (1, 20)], [(20, 20), (20, 60)], [(30, 30), (1, 1)]):
        case = make_case(chunks, 6, 2, 64)
        operands = (case.query, case.key_cache, case.value_cache, case.metadata, case.spec)
        found = TritonAttention().run(*operands)
        expected, magnitude = (exact.flatten(1) for exact in attend_exactly(case))
        assert_matches(found, expected, TOLERANCES[torch.float32], magnitude)
        assert_matches(ReferenceAttention().run(*operands), expected, TOLERANCES[torch.float32], magnitude)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit("set TRITON_INTERPRET=1")
    torch.manual_seed(0)
    make = torch.empty
    with mock.patch.object(torch, "empty", lambda *sizes, **options: poison(make(*sizes, **options))):
        check_shapes()
        check_parts()
        check_dtypes()
        check_backend()
