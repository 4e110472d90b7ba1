"""Prompts on their way through a model over paged caches and state slots that hold NaN until they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import AttentionMetadata, BatchMetadata, StateMetadata
from eightfold.kernels.selection import Kernels
from eightfold.layers.caches import CacheLayout, LayerCache, StateCache
from eightfold.models.causal_lm import CausalLM
from eightfold.models.loader import load, open_checkpoint, plan, read_model
from eightfold.quant.policy import Policy
from tests.models.checkpoints import reference_logits

TOLERANCE = 1e-4
"""On logits of size 8: what two orders of addition in fp32 may differ by after four layers, about 3e-5, with room."""

BLOCK_SIZE = 4


class PagedRun:
    """Some prompts, each in any steps. Blocks and slots are dealt to them in a random order, and some belong to none."""

    def __init__(self, model: CausalLM, prompts: Sequence[list[int]], *, seed: int = 0) -> None:
        self.model = model
        self.prompts = prompts
        generator = torch.Generator().manual_seed(seed)
        needs = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
        num_blocks, num_slots = sum(needs) + 3, len(prompts) + 2
        self.tables = torch.randperm(num_blocks, generator=generator).int()[: sum(needs)].split(needs)
        self.slots = torch.randperm(num_slots, generator=generator)[: len(prompts)]
        self.caches = poisoned_caches(model.arch.layout, num_blocks, num_slots)
        self.done = [0] * len(prompts)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]

    def step(self, lengths: Mapping[int, int]) -> None:
        """One batch: for each prompt by its number so many further tokens, in this order."""
        spans = [(index, range(self.done[index], self.done[index] + length)) for index, length in lengths.items()]
        positions = torch.tensor([position for _, span in spans for position in span])
        token_ids = torch.tensor([self.prompts[index][position] for index, span in spans for position in span])
        with torch.inference_mode():
            logits = self.model.logits(self.model(token_ids, positions, self.caches, self._metadata(spans)))
        for (index, span), part in zip(spans, logits.split(list(lengths.values())), strict=True):
            self.logits[index].append(part)
            self.done[index] = span.stop

    def check(self, reference: PreTrainedModel) -> None:
        """Compare all logits so far, and see that nothing was written but for these tokens."""
        for prompt, done, parts in zip(self.prompts, self.done, self.logits, strict=True):
            if done:
                close(torch.cat(parts), reference_logits(reference, prompt[:done]))
        for cache in self.caches:
            for pages in cache.kv or ():
                assert int(pages.isfinite().all(dim=(-1, -2)).sum()) == sum(self.done)
                assert int(pages.isnan().all(dim=(-1, -2)).sum()) == pages.shape[0] * BLOCK_SIZE - sum(self.done)
            for states in cache.state or ():
                written = states.flatten(1).isfinite().all(dim=1)
                assert set(written.nonzero().flatten().tolist()) == {
                    int(slot) for slot, done in zip(self.slots, self.done, strict=True) if done
                }
                assert states[~written].isnan().all()

    def _metadata(self, spans: Sequence[tuple[int, range]]) -> BatchMetadata:
        lengths = [len(span) for _, span in spans]
        query_start = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        slot_mapping = [
            int(self.tables[index][position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for index, span in spans
            for position in span
        ]
        attention = AttentionMetadata(
            slot_mapping=torch.tensor(slot_mapping),
            block_tables=torch.nn.utils.rnn.pad_sequence([self.tables[index] for index, _ in spans], batch_first=True),
            query_start=query_start,
            context_lens=torch.tensor([span.stop for _, span in spans], dtype=torch.int32),
            max_query_len=max(lengths),
            max_context_len=max(span.stop for _, span in spans),
        )
        none = torch.empty(0, dtype=torch.int64)
        state = StateMetadata(
            slots=torch.tensor([int(self.slots[index]) for index, _ in spans]),
            is_new=torch.tensor([span.start == 0 for _, span in spans]),
            query_start=query_start,
            save_sequences=none,
            save_lengths=none,
            save_slots=none,
            max_query_len=max(lengths),
        )
        return BatchMetadata(attention, state if self.model.arch.layout.has_state else None)


def poisoned_caches(layout: CacheLayout, num_blocks: int, num_slots: int) -> list[LayerCache]:
    """Room for a model's layers, full of NaN, in fp32."""

    def nan(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan)

    def one(attends: bool, recurs: bool) -> LayerCache:
        pages = (num_blocks, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim)
        kv = (nan(*pages), nan(*pages)) if attends else None
        if not recurs or layout.conv_shape is None or layout.ssm_shape is None:
            return LayerCache(kv)
        return LayerCache(kv, StateCache(nan(num_slots, *layout.conv_shape), nan(num_slots, *layout.ssm_shape)))

    return [one(attends, recurs) for attends, recurs in zip(layout.attends, layout.recurs, strict=True)]


def load_model(folder: Path, model: CausalLM | None = None, *, quantization: str | None = None, **backends: Any) -> CausalLM:
    """The model of a checkpoint in fp32, or the weights of one in another model."""
    model = model or read_model(folder)
    kernels = Kernels(detect("cpu"), torch.float32, **backends)
    checkpoint = open_checkpoint(folder)
    load(model, checkpoint, plan(model, checkpoint, Policy(quantization), kernels), kernels)
    return model


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of additions."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)
