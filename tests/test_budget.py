"""Which layers a budget keeps: the search by itself, the mixed model, and the list that it ends in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from eightfold.budget import MixedModel, choose, fewest, shortest_names
from eightfold.config import EngineConfig
from eightfold.errors import InputError
from eightfold.evaluate import checkpoint_logits, evaluate
from eightfold.models.loader import open_checkpoint, plan, read_model
from eightfold.quality import Pair
from eightfold.quant.policy import Policy
from tests.models.checkpoints import case, random_prompt, save_checkpoint
from tests.models.quantized import to_mxfp8

WINDOWS = [random_prompt(40, seed=seed) for seed in range(2)]


def pair(folder: Path, **values: Any) -> Pair:
    return Pair(EngineConfig(model=str(folder), **({"quantization": "mxfp8"} | values)))


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.1, 0.31, 0.5, 0.999, 1.0, 7.0])
@pytest.mark.parametrize("share", [0.7, 1.0, 1.6])
def test_the_search_ends_where_the_budget_is_just_met(budget: float, share: float) -> None:
    """Whether effects add up to the whole, or to less or more."""
    effects = sorted((1.0 / (1 + number) for number in range(37)), reverse=True)
    curve = [sum(effects[count:]) / sum(effects) for count in range(37)] + [0.0]
    asked: list[int] = []

    def kl_at(count: int) -> float:
        asked.append(count)
        return curve[count]

    found = fewest(kl_at, [share * effect for effect in effects], budget)
    assert found == next(count for count, kl in enumerate(curve) if kl <= budget)
    assert len(set(asked)) <= 8


def test_a_good_prediction_takes_three_runs() -> None:
    curve = [1.0, 0.6, 0.3, 0.1, 0.05, 0.0]
    effects = [before - after for before, after in pairwise(curve)]
    asked: list[int] = []

    def kl_at(count: int) -> float:
        asked.append(count)
        return curve[count]

    assert fewest(kl_at, effects, 0.2) == 3
    assert asked == [0, 3, 2]


LAYERS = [
    f"model.layers.{index}.{part}" for index in (0, 1, 10) for part in ("attn.q", "attn.k", "attn.o", "mlp.up", "mlp.down")
]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([], ()),
        (["model.layers.1.attn.q"], ("model.layers.1.attn.q",)),
        (["model.layers.1.attn.q", "model.layers.1.attn.o"], ("model.layers.1.attn.q", "model.layers.1.attn.o")),
        (["model.layers.1.mlp.down", "model.layers.1.mlp.up"], ("model.layers.1.mlp",)),
        ([name for name in LAYERS if "layers.1." in name], ("model.layers.1",)),
        (LAYERS, ("model",)),
        (["a.b", "a.b.c"], ("a",)),
    ],
)
def test_names_are_short_and_match_nothing_else(chosen: Sequence[str], expected: tuple[str, ...]) -> None:
    assert shortest_names(chosen, [*LAYERS, "a.b", "a.b.c"] if chosen != LAYERS else LAYERS) == expected


@pytest.mark.parametrize("name", ["llama-odd-80", "qwen3-moe", "qwen2-moe", "nemotron-latent", "granite-hybrid", "llama-tied"])
def test_the_mixed_model_is_the_one_that_is_loaded_with_that_list(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case(name), tmp_path)
    subject = pair(folder, quantize_lm_head=name == "llama-tied")
    mixed = MixedModel(subject)
    everything = [layer for unit in mixed.units for layer in unit.layers]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        kept = [number for number in range(len(mixed.units)) if torch.rand(1, generator=generator) < 0.4]
        mixed.keep(kept)
        names = shortest_names([layer for number in kept for layer in mixed.units[number].layers], everything)
        policy = Policy("mxfp8", names, subject.policy.quantize_lm_head)
        expected = checkpoint_logits(folder, subject.kernels, policy=policy)
        assert torch.equal(mixed.logits(WINDOWS[0]), expected(WINDOWS[0]))
        nbytes = plan(read_model(folder), open_checkpoint(folder), policy, subject.kernels).weight_bytes
        units = [mixed.units[number] for number in kept]
        assert mixed.bytes_quantized + sum(unit.bytes_kept - unit.bytes_quantized for unit in units) == nbytes
    mixed.keep(range(len(mixed.units)))
    assert torch.equal(mixed.logits(WINDOWS[0]), mixed.reference(WINDOWS[0]))


def test_a_budget_is_met_by_as_few_as_will_do(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-odd-80"), tmp_path)
    subject = pair(folder)
    reference = subject.reference_logits()
    whole = evaluate(subject.model_logits(), reference, WINDOWS).kl
    seen: list[tuple[str, int, int]] = []
    kept = choose(subject, WINDOWS, whole / 3, report=lambda *event: seen.append(event))
    assert kept.num_tokens == 78
    assert list(kept.effects) == sorted(kept.effects, reverse=True)
    assert 0 < kept.kept < len(kept.units) == 12
    assert kept.curve[0].kl == pytest.approx(whole)
    assert (kept.curve[-1].kept, kept.curve[-1].kl) == (12, 0.0)
    assert kept.chosen.kl <= whole / 3
    assert all(point.kl > whole / 3 for point in kept.curve if point.kept < kept.kept)
    assert kept.kept - 1 in {point.kept for point in kept.curve}
    policy = Policy("mxfp8", kept.ignored_layers)
    served = evaluate(checkpoint_logits(folder, subject.kernels, policy=policy), reference, WINDOWS).kl
    assert served == pytest.approx(kept.chosen.kl, rel=1e-6)
    assert {event[0] for event in seen} == {"measure"}
    assert max(event[1] for event in seen) == 12
    # An effect is that of one layer alone.
    others = tuple(layer for unit in kept.units[1:] for layer in unit.layers)
    alone = checkpoint_logits(folder, subject.kernels, policy=Policy("mxfp8", others))
    assert evaluate(alone, reference, WINDOWS).kl == pytest.approx(kept.effects[0], rel=1e-6)


def test_ends_of_the_scale(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    rich, poor = choose(pair(folder), WINDOWS, 1.0), choose(pair(folder), WINDOWS, 0.0)
    assert (rich.kept, rich.ignored_layers) == (0, ())
    assert (poor.kept, poor.ignored_layers) == (12, ("model",))
    assert poor.chosen.nbytes == sum(tensor.nbytes for tensor in open_checkpoint(folder).tensors.values())


def test_layers_that_the_user_keeps_stay_kept(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path)
    kept = choose(pair(folder, quantization_ignored_layers=("layers.1",)), WINDOWS, 1.0)
    assert (len(kept.units), kept.ignored_layers) == (8, ("layers.1",))


def test_what_has_no_layers_to_choose_from_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(case("llama-gqa"), tmp_path / "a")
    with pytest.raises(InputError, match="--quantization-budget: got a model of which nothing is quantized"):
        choose(pair(folder, quantization=None), WINDOWS, 0.1)
    stored = to_mxfp8(save_checkpoint(case("llama-gqa"), tmp_path / "b"), "native")
    with pytest.raises(InputError, match="what was lost does not come back"):
        choose(Pair(EngineConfig(model=str(stored)), str(folder)), WINDOWS, 0.1)
