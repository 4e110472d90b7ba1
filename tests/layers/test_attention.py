"""The attention layer against its formula, written with plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eightfold.kernels.operations import AttentionMetadata
from eightfold.layers.attention import Attention, QKNorm
from eightfold.layers.rotary import RopeConfig, rotary_table
from tests.layers.helpers import fill, kernels

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 40, 4, 2, 10, 7
TABLE = rotary_table(RopeConfig("default", 100.0, HEAD_DIM), 32)


def layer(*, window: int | None = None, rope: bool = True, bias: bool = False, norms: QKNorm | None = None) -> Attention:
    return Attention(
        "a",
        HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=0.3,
        sliding_window=window,
        uses_rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norms,
        norm_eps=1e-6,
    )


def by_formula(attention: Attention, values: dict[str, Tensor], x: Tensor) -> Tensor:
    """The whole sequence at once."""

    def project(part: str, inputs: Tensor) -> Tensor:
        return inputs @ values[f"a.{part}_proj.weight"].T + values.get(f"a.{part}_proj.bias", torch.zeros(1))

    heads = {part: project(part, x).view(LENGTH, -1, HEAD_DIM) for part in "qkv"}
    for part in "qk":
        if f"a.{part}_norm.weight" in values:
            whole = heads[part] if attention.qk_norm == "head" else heads[part].flatten(1)
            weight = values[f"a.{part}_norm.weight"]
            heads[part] = torch.nn.functional.rms_norm(whole, weight.shape, weight, 1e-6).view_as(heads[part])
        if attention.uses_rope:
            cos, sin = TABLE[:LENGTH].unsqueeze(1).chunk(2, dim=-1)
            first, second = heads[part].chunk(2, dim=-1)
            heads[part] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
    hidden = (distance < 0) | (distance >= (attention.sliding_window or LENGTH))
    out = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = (heads["q"][:, head] @ heads["k"][:, group].T * 0.3).masked_fill(hidden, float("-inf"))
        out.append(scores.softmax(dim=-1) @ heads["v"][:, group])
    return project("o", torch.cat(out, dim=-1))


def metadata(start: int, length: int, blocks: list[int]) -> AttentionMetadata:
    positions = range(start, start + length)
    return AttentionMetadata(
        slot_mapping=torch.tensor([blocks[position // 4] * 4 + position % 4 for position in positions]),
        block_tables=torch.tensor([blocks], dtype=torch.int32),
        query_start=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([start + length], dtype=torch.int32),
        max_query_len=length,
        max_context_len=start + length,
    )


@pytest.mark.parametrize("chunks", [[7], [3, 4], [1] * 7])
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"rope": False}, {"bias": True}, {"norms": "head"}, {"norms": "whole"}], ids=str
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_any_chunks_equal_the_formula(options: dict[str, Any], chunks: list[int], backend: str) -> None:
    attention = layer(**options)
    values = fill(attention)
    attention.bind(kernels(attention_backend=backend))
    assert attention.chosen[0].operation == "attention"
    x = 0.2 * torch.randn(LENGTH, HIDDEN)
    cache = torch.empty(3, 4, KV_HEADS, HEAD_DIM), torch.empty(3, 4, KV_HEADS, HEAD_DIM)
    found, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length)
        found.append(attention(x[positions], positions, TABLE, cache, metadata(start, length, [2, 0])))
        start += length
    assert torch.allclose(torch.cat(found), by_formula(attention, values, x), rtol=1e-4, atol=1e-4)
