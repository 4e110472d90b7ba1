"""Embeddings, and heads that are tied to them or not, quantized or not."""

from __future__ import annotations

import pytest
import torch

from eightfold.kernels import native
from eightfold.layers.embedding import Embedding, OutputHead
from eightfold.layers.module import Module
from eightfold.quant.mxfp8 import dequantize, quantize
from tests.layers.helpers import fill, kernels


class Ends(Module):
    """The two ends of a model."""

    def __init__(self, tied: bool) -> None:
        self.embed = Embedding("embed", 50, 40)
        self.head = OutputHead("head", 50, 40, tied_to=self.embed if tied else None)


def test_rows_are_selected() -> None:
    ends = Ends(tied=False)
    table = fill(ends)["embed.weight"]
    ends.bind(kernels())
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(ends.embed(ids), table[ids])


@pytest.mark.parametrize("quantize_lm_head", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_come_from_the_right_weight(tied: bool, quantize_lm_head: bool) -> None:
    ends = Ends(tied)
    shares = tied and not quantize_lm_head
    values = fill(ends.embed) if shares else fill(ends, "mxfp8", quantize_lm_head=quantize_lm_head)
    ends.bind(kernels())
    weight = values["embed.weight" if tied else "head.weight"]
    if quantize_lm_head:
        weight = dequantize(quantize(weight))
    x = torch.randn(3, 40)
    assert torch.allclose(ends.head(x), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(ends.embed(torch.tensor([7])), values["embed.weight"][7:8])


def test_a_tied_head_shares_the_storage_of_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "status", lambda: native.Status(None, "for this test the reference, which keeps its operands"))
    ends = Ends(tied=True)
    fill(ends.embed)
    ends.bind(kernels())
    weight, _ = vars(ends.head.linear)["_prepared"]
    assert weight is ends.embed.table
