"""The measures of quality, by hand and on tiny checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eightfold.errors import InputError
from eightfold.evaluate import LogitsFn, Quality, checkpoint_logits, evaluate
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.quant.mxfp8 import MXTensor, ScaleRule, dequantize, fold, quantize
from eightfold.quant.policy import Policy
from tests.models.checkpoints import case, random_prompt, reference_logits, reference_model, save_checkpoint

VOCAB_SIZE = 11


def table_model(table: Tensor) -> LogitsFn:
    """A model in which a token's logits depend on that token alone, by a table `[V, V]`."""
    return lambda window: table[torch.tensor(window)]


def constant(*logits: float) -> LogitsFn:
    return table_model(torch.tensor(logits).expand(len(logits), -1))


def random_table(seed: int) -> Tensor:
    return 2.0 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def random_windows(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def by_definition(model: LogitsFn, reference: LogitsFn, windows: Sequence[Sequence[int]]) -> Quality:
    """The same measures token by token, from probabilities in fp64."""
    loss, divergence, agreement, count = 0.0, 0.0, 0, 0
    for window in windows:
        for position, following in enumerate(window[1:]):
            q = model(window)[position].double().softmax(dim=-1)
            p = reference(window)[position].double().softmax(dim=-1)
            loss -= math.log(q[following])
            divergence += sum(float(p[token]) * math.log(p[token] / q[token]) for token in range(len(p)))
            agreement += int(p.argmax() == q.argmax())
            count += 1
    return Quality(math.exp(loss / count), divergence / count, agreement / count, count)


def test_by_hand() -> None:
    """Three scored tokens: 1, 2 and 2. The model gives them 1/4, 1/4 and 1/4; the reference prefers token 0."""
    model, reference = constant(math.log(2), 0.0, 0.0), constant(math.log(4), math.log(2), 0.0)
    found = evaluate(model, reference, [[0, 1, 2], [2, 2]])
    assert found.num_tokens == 3
    assert math.isclose(found.perplexity, 4.0, rel_tol=1e-6)
    expected = 4 / 7 * math.log((4 / 7) / (1 / 2)) + 2 / 7 * math.log((2 / 7) / (1 / 4)) + 1 / 7 * math.log((1 / 7) / (1 / 4))
    assert math.isclose(found.kl, expected, rel_tol=1e-5)
    assert found.same_top1 == 1.0


def test_measures_are_those_of_the_definition() -> None:
    # Positions are scored in parts of 64: one window has less than a part, one a part and a bit, one several.
    windows = random_windows(2, 66, 150)
    model, reference = table_model(random_table(1)), table_model(random_table(2))
    found, expected = evaluate(model, reference, windows), by_definition(model, reference, windows)
    assert math.isclose(found.perplexity, expected.perplexity, rel_tol=1e-5)
    assert math.isclose(found.kl, expected.kl, rel_tol=1e-5)
    assert (found.same_top1, found.num_tokens) == (expected.same_top1, 1 + 65 + 149)


def test_the_same_top_token_is_counted_by_position() -> None:
    assert evaluate(constant(0.0, 1.0, 0.0), constant(0.0, 0.0, 1.0), [[0, 1, 2]]).same_top1 == 0.0


def test_a_model_is_no_distance_from_itself() -> None:
    model = table_model(random_table(1))
    found = evaluate(model, model, random_windows(70))
    assert (found.kl, found.same_top1) == (0.0, 1.0)


def test_a_broken_model_is_infinitely_perplexed() -> None:
    model = constant(1e4, 0.0)
    assert evaluate(model, model, [[0, 1]]).perplexity == math.inf


def test_windows_are_taken_one_at_a_time_and_each_model_sees_each_once() -> None:
    events: list[str] = []

    def windows() -> Iterator[list[int]]:
        for number, window in enumerate(random_windows(5, 5)):
            events.append(f"window {number}")
            yield window

    def recording(name: str) -> LogitsFn:
        def logits(window: Sequence[int]) -> Tensor:
            events.append(name)
            return torch.zeros(len(window), VOCAB_SIZE)

        return logits

    model = recording("model")
    evaluate(model, recording("reference"), windows())
    assert events == ["window 0", "model", "reference", "window 1", "model", "reference"]
    events.clear()
    evaluate(model, model, windows())
    assert events == ["window 0", "model", "window 1", "model"]


@pytest.mark.parametrize("windows", [[], [[]], [[3]], [[1, 2], [3]]])
def test_a_window_without_a_token_to_score_is_refused(windows: list[list[int]]) -> None:
    model = table_model(random_table(0))
    with pytest.raises(InputError, match="window"):
        evaluate(model, model, windows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(case("llama-odd-80"), tmp_path_factory.mktemp("llama"))


def kernels() -> Kernels:
    return Kernels(detect("cpu"), torch.float32)


@pytest.mark.parametrize("length", [1, 16, 37])  # less than a block of the cache, just one, and a bit more than two
def test_logits_of_a_checkpoint_are_those_of_transformers(folder: Path, length: int) -> None:
    logits = checkpoint_logits(folder, kernels(), policy=Policy(None))
    prompt = random_prompt(length)
    assert float((logits(prompt) - reference_logits(reference_model(folder), prompt)).abs().max()) < 1e-4


def test_quantization_shows_and_folding_does_not(folder: Path) -> None:
    stored = checkpoint_logits(folder, kernels(), policy=Policy(None))
    quantized = checkpoint_logits(folder, kernels(), policy=Policy("mxfp8"))
    folded = checkpoint_logits(folder, kernels(), policy=Policy("mxfp8"), folded=True)
    windows = [random_prompt(40, seed=seed) for seed in range(3)]
    assert 1e-4 < evaluate(quantized, stored, windows).kl < 0.1
    assert evaluate(folded, quantized, windows).kl < 1e-6


def folded_values(mx: MXTensor) -> Tensor:
    found = fold(mx)
    return found.data.float() * torch.exp2(found.row_scale.float() - 127).unsqueeze(-1)


@pytest.mark.parametrize(("rule", "folded"), [(ScaleRule.CEIL, False), (ScaleRule.FLOOR, False), (ScaleRule.CEIL, True)])
def test_a_quantized_checkpoint_is_the_one_whose_weights_were_replaced(tmp_path: Path, rule: ScaleRule, folded: bool) -> None:
    stored = save_checkpoint(case("llama-gqa"), tmp_path / "stored")
    replaced = save_checkpoint(case("llama-gqa"), tmp_path / "replaced")
    weights = load_file(stored / "model.safetensors")
    projections = [weight for name, weight in weights.items() if "_proj." in name]
    for weight in projections:
        # The blocks of a row lie so far apart that folding rounds.
        weight.mul_(torch.exp2(-9.0 * (torch.arange(weight.shape[1]) // 32 % 2)))
    save_file(weights, stored / "model.safetensors", metadata={"format": "pt"})
    for weight in projections:
        mx = quantize(weight, rule)
        weight.copy_(folded_values(mx) if folded else dequantize(mx))
    save_file(weights, replaced / "model.safetensors", metadata={"format": "pt"})

    found = checkpoint_logits(stored, kernels(), policy=Policy("mxfp8"), rule=rule, folded=folded)
    expected = checkpoint_logits(replaced, kernels(), policy=Policy(None))
    unfolded = checkpoint_logits(stored, kernels(), policy=Policy("mxfp8"), rule=rule)
    prompt = random_prompt(40)
    torch.testing.assert_close(found(prompt), expected(prompt), atol=1e-4, rtol=1e-4)
    assert torch.equal(unfolded(prompt), found(prompt)) is not folded
