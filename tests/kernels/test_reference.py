"""The reference against formulas written another way, since every fast kernel is compared with it."""

from __future__ import annotations

import math

import pytest
import torch

from eightfold.kernels.operations import AttentionMetadata, AttentionSpec
from eightfold.kernels.reference import ReferenceAttention, ReferenceFused, ReferenceLinear
from eightfold.quant.mxfp8 import dequantize, quantize

FUSED = ReferenceFused()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 33, 576])
def test_linear_is_the_product_with_the_dequantized_weight(k: int) -> None:
    weight, x, bias = quantize(randn(7, k)), randn(5, k, seed=1), randn(7, seed=2)
    linear = ReferenceLinear()
    expected = x.double() @ dequantize(weight).double().T + bias.double()
    assert torch.allclose(linear.run(x, linear.prepare(weight, bias)).double(), expected, rtol=1e-5, atol=1e-5)
    dense = randn(7, k).bfloat16()
    expected = x.double() @ dense.double().T
    assert torch.allclose(linear.run(x, linear.prepare(dense, None)).double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0]])
    found = FUSED.rms_norm(x, torch.tensor([1.0, 2.0]), 0.0)
    assert torch.allclose(found, torch.tensor([[3.0 / math.sqrt(12.5), 8.0 / math.sqrt(12.5)]]))
    normed, total = FUSED.add_rms_norm(x, torch.tensor([[1.0, -1.0]]), torch.ones(2), 0.0)
    assert torch.equal(total, torch.tensor([[4.0, 3.0]]))
    assert torch.allclose(normed, total / math.sqrt(12.5))


def test_rotary_turns_each_pair_by_its_angle() -> None:
    angles = torch.tensor([[0.0, 0.0], [math.pi / 2, math.pi]])
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)  # two positions, rotary_dim 4
    query = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]])  # head_dim 5: the last element passes through
    at_zero, _ = FUSED.rotary(query, query, table, torch.tensor([0]))
    at_one, key = FUSED.rotary(query, query, table, torch.tensor([1]))
    assert torch.equal(at_zero, query)
    # (1, 3) turned by 90 degrees is (-3, 1); (2, 4) turned by 180 degrees is (-2, -4).
    assert torch.allclose(at_one, torch.tensor([[[-3.0, -2.0, 1.0, -4.0, 5.0]]]), atol=1e-6)
    assert torch.equal(at_one, key)


def test_silu_and_mul_takes_the_gate_first() -> None:
    found = FUSED.silu_and_mul(torch.tensor([[1.0, -2.0, 10.0, 100.0]]))
    sigmoid = [1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(2.0))]
    assert torch.allclose(found, torch.tensor([[10.0 * sigmoid[0], -200.0 * sigmoid[1]]]))


def test_write_kv_puts_each_token_into_its_slot() -> None:
    cache = torch.zeros(3, 4, 1, 2), torch.zeros(3, 4, 1, 2)
    FUSED.write_kv(randn(2, 1, 2), randn(2, 1, 2, seed=1), *cache, torch.tensor([9, 2]))
    assert torch.equal(cache[0][2, 1], randn(2, 1, 2)[0])
    assert torch.equal(cache[1][0, 2], randn(2, 1, 2, seed=1)[1])
    assert int((cache[0] != 0).sum()) == 4


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_is_softmax_over_what_each_token_may_see(window: int | None, num_kv_heads: int) -> None:
    """Two sequences in scattered blocks: a chunk of 3 that ends a context of 7, and a decode at a context of 5."""
    spec = AttentionSpec(4, num_kv_heads, 6, 0.37, window, torch.float32)
    key_cache, value_cache = (torch.full((6, 4, num_kv_heads, 6), float("nan")) for _ in range(2))
    tables = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    contexts, chunks = [7, 5], [3, 1]
    keys = [randn(n, num_kv_heads, 6, seed=n) for n in contexts]
    values = [randn(n, num_kv_heads, 6, seed=n + 50) for n in contexts]
    for sequence in range(2):
        for position in range(contexts[sequence]):
            block, offset = int(tables[sequence, position // 4]), position % 4
            key_cache[block, offset] = keys[sequence][position]
            value_cache[block, offset] = values[sequence][position]
    query = randn(4, 4, 6, seed=9)
    metadata = AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_tables=tables,
        query_start=torch.tensor([0, 3, 4], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        max_query_len=3,
        max_context_len=7,
    )
    found = ReferenceAttention().run(query, key_cache, value_cache, metadata, spec).view(4, 4, 6)
    row = 0
    for sequence in range(2):
        for offset in range(chunks[sequence]):
            position = contexts[sequence] - chunks[sequence] + offset
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(4):
                kv_head = head // (4 // num_kv_heads)
                seen_keys = keys[sequence][first : position + 1, kv_head].double()
                weights = (seen_keys @ query[row, head].double() * 0.37).softmax(0)
                expected = weights @ values[sequence][first : position + 1, kv_head].double()
                assert torch.allclose(found[row, head].double(), expected, atol=1e-6)
            row += 1
