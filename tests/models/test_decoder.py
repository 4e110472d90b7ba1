"""Whole models against transformers, in fp32: prefill, decode, chunks and mixed batches over a paged and poisoned cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eightfold.layers.rotary import RopeConfig
from eightfold.models.arch import DecoderArch, LayerArch
from eightfold.models.decoder import Decoder
from eightfold.models.loader import read_model
from tests.models.checkpoints import (
    DECODER_CASES,
    LENGTH,
    Case,
    case,
    random_prompt,
    reference_logits,
    reference_model,
    save_checkpoint,
)
from tests.models.paged_run import TOLERANCE, PagedRun, load_model

CHUNKS = (1, 5, 8, 13)


@dataclass(frozen=True, slots=True)
class Pair:
    """One checkpoint in transformers and in Eightfold."""

    reference: PreTrainedModel
    model: Decoder

    @property
    def longest(self) -> int:
        return min(LENGTH, self.model.arch.context_length)


def load_decoder(
    folder: Path, change: Callable[[DecoderArch], DecoderArch] = lambda arch: arch, *, attention_backend: str = "auto"
) -> Decoder:
    """The decoder of a checkpoint, or one that `change` makes of its architecture."""
    found = read_model(folder)
    assert isinstance(found, Decoder)
    model = Decoder(change(found.arch))
    load_model(folder, model, attention_backend=attention_backend)
    return model


@pytest.fixture(scope="module", params=DECODER_CASES, ids=lambda item: item.name)
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
    ("mixtral", lambda arch: with_routing(arch, top_k=1)),
    ("mixtral", lambda arch: with_routing(arch, normalize=False)),
    ("qwen2-moe", lambda arch: with_routing(arch, normalize=True)),
    ("qwen3-moe", lambda arch: with_routing(arch, normalize=False)),
    ("olmoe", lambda arch: with_routing(arch, top_k=2)),
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


def with_routing(arch: DecoderArch, **changes: Any) -> DecoderArch:
    mixtures = [
        layer.mixture and replace(layer.mixture, routing=replace(layer.mixture.routing, **changes)) for layer in arch.layers
    ]
    return replace(
        arch, layers=tuple(replace(layer, mixture=mixture) for layer, mixture in zip(arch.layers, mixtures, strict=True))
    )


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
@pytest.mark.parametrize(
    "name", ["llama-tied", "mistral-window", "qwen2", "qwen3", "smollm3-window", "llama-odd-80", "mixtral", "olmoe"]
)
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
