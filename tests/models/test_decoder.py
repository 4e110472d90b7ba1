"""Whole models against transformers, in fp32: prefill, decode, chunks and mixed batches over a paged and poisoned cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import AttentionMetadata
from eightfold.kernels.selection import Kernels
from eightfold.layers.rotary import RopeConfig
from eightfold.models.arch import DecoderArch, LayerArch
from eightfold.models.checkpoint import Checkpoint
from eightfold.models.decoder import Decoder
from eightfold.models.loader import load, plan, read_model
from eightfold.quant.policy import Policy
from tests.models.checkpoints import (
    CASES,
    LENGTH,
    Case,
    case,
    random_prompt,
    reference_logits,
    reference_model,
    save_checkpoint,
)

TOLERANCE = 1e-4
"""On logits of size 8: what two orders of addition in fp32 may differ by after four layers, about 3e-5, with room."""

BLOCK_SIZE = 4
CHUNKS = (1, 5, 8, 13)


@dataclass(frozen=True, slots=True)
class Pair:
    """One checkpoint in transformers and in Eightfold."""

    reference: PreTrainedModel
    model: Decoder

    @property
    def longest(self) -> int:
        return min(LENGTH, self.model.arch.context_length)


class PagedRun:
    """Some prompts on their way through a model, each in any steps, over one cache that holds NaN until it is written.

    Blocks are dealt to the prompts in a random order, and some belong to none.
    """

    def __init__(self, model: Decoder, prompts: Sequence[list[int]], *, seed: int = 0) -> None:
        self.model = model
        self.prompts = prompts
        needs = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
        num_blocks = sum(needs) + 3
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).int()
        self.tables = blocks[: sum(needs)].split(needs)
        shape = (num_blocks, BLOCK_SIZE, model.arch.num_kv_heads, model.arch.head_dim)
        self.caches = [(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in model.arch.layers]
        self.done = [0] * len(prompts)
        self.logits: list[list[Tensor]] = [[] for _ in prompts]

    def step(self, lengths: Mapping[int, int]) -> None:
        """One batch: for each prompt by its number so many further tokens, in this order."""
        spans = [(index, range(self.done[index], self.done[index] + length)) for index, length in lengths.items()]
        positions = torch.tensor([position for _, span in spans for position in span])
        token_ids = torch.tensor([self.prompts[index][position] for index, span in spans for position in span])
        slots = [
            int(self.tables[index][position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
            for index, span in spans
            for position in span
        ]
        metadata = AttentionMetadata(
            slot_mapping=torch.tensor(slots),
            block_tables=torch.nn.utils.rnn.pad_sequence([self.tables[index] for index, _ in spans], batch_first=True),
            query_start=torch.tensor([0, *accumulate(lengths.values())], dtype=torch.int32),
            context_lens=torch.tensor([span.stop for _, span in spans], dtype=torch.int32),
            max_query_len=max(lengths.values()),
            max_context_len=max(span.stop for _, span in spans),
        )
        with torch.inference_mode():
            logits = self.model.logits(self.model(token_ids, positions, self.caches, metadata))
        for (index, span), part in zip(spans, logits.split(list(lengths.values())), strict=True):
            self.logits[index].append(part)
            self.done[index] = span.stop

    def check(self, reference: PreTrainedModel) -> None:
        """Compare all logits so far, and see that nothing was written outside of the slots of the tokens."""
        for prompt, done, parts in zip(self.prompts, self.done, self.logits, strict=True):
            if done:
                close(torch.cat(parts), reference_logits(reference, prompt[:done]))
        for cache in (tensor for pair in self.caches for tensor in pair):
            assert int(cache.isfinite().all(dim=(-1, -2)).sum()) == sum(self.done)
            assert int(cache.isnan().all(dim=(-1, -2)).sum()) == cache.shape[0] * BLOCK_SIZE - sum(self.done)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def load_decoder(
    folder: Path, change: Callable[[DecoderArch], DecoderArch] | None = None, *, attention_backend: str = "auto"
) -> Decoder:
    """The decoder of a checkpoint, or one that `change` makes of its architecture."""
    arch, model = read_model(folder)
    if change is not None:
        model = Decoder(change(arch))
    kernels = Kernels(detect("cpu"), torch.float32, attention_backend=attention_backend)
    checkpoint = Checkpoint(folder)
    load(model, checkpoint, plan(model, checkpoint, Policy(None), kernels), kernels)
    return model


@pytest.fixture(scope="module", params=CASES, ids=lambda item: item.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    item: Case = request.param
    folder = save_checkpoint(item, tmp_path_factory.mktemp(item.name))
    return Pair(reference_model(folder), load_decoder(folder))


def test_logits_discriminate(pair: Pair) -> None:
    """Else the tests below would show nothing: logits are large, and depend on the order of earlier tokens."""
    prompt = random_prompt(pair.longest)
    logits = reference_logits(pair.reference, prompt)
    assert logits.std() > 1
    swapped = [*prompt[:-4], prompt[-3], prompt[-4], *prompt[-2:]]
    assert (reference_logits(pair.reference, swapped)[-1] - logits[-1]).abs().max() > 100 * TOLERANCE


PLAIN = RopeConfig("default", 10_000.0, 16)
CHANGES: tuple[tuple[str, Callable[[DecoderArch], DecoderArch]], ...] = (
    ("llama-gqa", lambda arch: replace(arch, rope=replace(arch.rope, theta=20_000.0))),
    ("llama-gqa", lambda arch: replace(arch, attention_scale=1.1 * arch.attention_scale)),
    ("llama-linear", lambda arch: replace(arch, rope=PLAIN)),
    ("llama-llama3", lambda arch: replace(arch, rope=replace(PLAIN, theta=500.0))),
    ("llama-yarn", lambda arch: replace(arch, rope=replace(PLAIN, theta=500.0))),
    ("llama-yarn", lambda arch: replace(arch, rope=replace(arch.rope, attention_factor=1.0))),
    ("mistral-window", lambda arch: with_layers(arch, LayerArch(True, None))),
    ("mistral-window", lambda arch: with_layers(arch, LayerArch(True, 9))),
    ("qwen2-late-window", lambda arch: with_layers(arch, LayerArch(True, 8))),
    ("qwen3-layer-types", lambda arch: with_layers(arch, LayerArch(True, 5))),
    ("smollm3", lambda arch: with_layers(arch, LayerArch(True, None))),
    ("smollm3-window", lambda arch: replace(arch, layers=tuple(replace(layer, sliding_window=None) for layer in arch.layers))),
)


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_comparison_sees_a_wrong_feature(name: str, change: Callable[[DecoderArch], DecoderArch], tmp_path: Path) -> None:
    """Each feature acts within the tested length, so that an architecture without it, or with another, fails."""
    folder = save_checkpoint(case(name), tmp_path)
    run = PagedRun(load_decoder(folder, change), [random_prompt(LENGTH)])
    run.step({0: LENGTH})
    with pytest.raises(AssertionError, match="not close"):
        run.check(reference_model(folder))


def with_layers(arch: DecoderArch, layer: LayerArch) -> DecoderArch:
    return replace(arch, layers=(layer,) * arch.num_layers)


def test_prefill(pair: Pair) -> None:
    run = PagedRun(pair.model, [random_prompt(pair.longest)])
    run.step({0: pair.longest})
    run.check(pair.reference)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prefill_in_chunks(pair: Pair, chunk: int) -> None:
    """Chunks of one token are decode from the first token on."""
    run = PagedRun(pair.model, [random_prompt(pair.longest)])
    for start in range(0, pair.longest, chunk):
        run.step({0: min(chunk, pair.longest - start)})
    run.check(pair.reference)


def test_decode_after_prefill(pair: Pair) -> None:
    run = PagedRun(pair.model, [random_prompt(pair.longest)])
    run.step({0: pair.longest - 9})
    for _ in range(9):
        run.step({0: 1})
    run.check(pair.reference)


def test_prefill_of_unequal_lengths(pair: Pair) -> None:
    lengths = [7, 1, pair.longest, 16, pair.longest // 2 + 1]
    run = PagedRun(pair.model, [random_prompt(length, seed=length) for length in lengths])
    run.step(dict(enumerate(lengths)))
    run.check(pair.reference)


def test_mixed_prefill_and_decode(pair: Pair) -> None:
    """Prompts that start, go on in chunks and decode in the same batches, in changing order, as the scheduler makes them."""
    run = PagedRun(pair.model, [random_prompt(length, seed=length) for length in (20, pair.longest, 30, 9)])
    run.step({0: 17})
    run.step({0: 1, 1: 11})
    run.step({2: 29, 1: 8, 0: 1})
    run.step({0: 1, 2: 1, 1: pair.longest - 19, 3: 9})
    assert run.done == [20, pair.longest, 30, 9]
    run.check(pair.reference)


def test_logits_do_not_depend_on_where_the_blocks_lie(pair: Pair) -> None:
    prompt = random_prompt(pair.longest)
    runs = [PagedRun(pair.model, [prompt], seed=seed) for seed in (1, 2)]
    for run in runs:
        run.step({0: 21})
        run.step({0: 1})
    assert torch.equal(torch.cat(runs[0].logits[0]), torch.cat(runs[1].logits[0]))


def test_dynamic_scaling_beyond_the_original_length(tmp_path: Path) -> None:
    """A model made to serve longer sequences equals a prefill of that full length, in whatever steps it gets there."""
    folder = save_checkpoint(case("llama-dynamic"), tmp_path)
    model = load_decoder(folder, lambda arch: replace(arch, context_length=LENGTH))
    for chunk in (LENGTH, 13, 1):
        run = PagedRun(model, [random_prompt(LENGTH)])
        for start in range(0, LENGTH, chunk):
            run.step({0: min(chunk, LENGTH - start)})
        run.check(reference_model(folder))


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen3-layer-types"])
def test_reference_attention(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path)
    run = PagedRun(load_decoder(folder, attention_backend="reference"), [random_prompt(LENGTH), random_prompt(10, seed=1)])
    run.step({1: 10, 0: 30})
    run.step({0: LENGTH - 31})
    run.step({0: 1})
    run.check(reference_model(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "qwen2", "qwen3", "smollm3-window", "llama-odd-80"])
def test_narrow_files_with_fp32_arithmetic(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path, dtype=dtype)
    run = PagedRun(load_decoder(folder), [random_prompt(LENGTH), random_prompt(10, seed=1)])
    run.step({0: 40, 1: 10})
    run.step({0: LENGTH - 40})
    run.check(reference_model(folder))


@pytest.mark.parametrize("name", ["llama-attention-bias", "qwen3"])
def test_several_files(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    run = PagedRun(load_decoder(folder), [random_prompt(LENGTH)])
    run.step({0: LENGTH})
    run.check(reference_model(folder))
