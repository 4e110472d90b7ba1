"""Sampling: exact distributions, every parameter, and independence of the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eightfold.engine.sampler import sample, token_logprobs, uniform
from eightfold.types import NEUTRAL_SAMPLING, Request, SamplingParams, Sequence

VOCAB = 50
EOS = frozenset({7})


def sequence(prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), seed: int = 0, **params: Any) -> Sequence:
    request = Request("r", prompt, SamplingParams(**params).resolved(NEUTRAL_SAMPLING), seed)
    made = Sequence.start(request)
    made.token_ids.extend(output)
    return made


def logits(seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draws(row: Tensor, count: int, **params: Any) -> Tensor:
    """Counts of the tokens that `count` seeds draw from one row of logits."""
    sequences = [sequence(seed=seed, **params) for seed in range(count)]
    return torch.bincount(torch.tensor(sample(row.expand(count, -1), sequences, EOS)), minlength=len(row))


def test_greedy_is_the_largest_logit() -> None:
    row = logits()
    assert sample(row[None], [sequence(temperature=0.0)], EOS) == [int(row.argmax())]


def test_uniform_is_uniform_and_depends_on_both_arguments() -> None:
    values = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert ((values >= 0) & (values < 1)).all()
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 44  # chi-square, 19 degrees of freedom, p = 0.001
    assert len({uniform(3, position) for position in range(1000)}) == 1000
    assert len({uniform(seed, 3) for seed in range(1000)}) == 1000


@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05}, {"temperature": 0.5}],
)
def test_frequencies_follow_the_truncated_distribution(params: dict[str, Any]) -> None:
    row, count = logits(1), 4000
    expected = truncated(row, **params)
    counts = draws(row, count, **params)
    assert (counts[expected == 0] == 0).all()
    deviation = (counts - expected * count).abs() / (expected * (1 - expected) * count).sqrt().clamp(min=1)
    assert float(deviation.max()) < 4.5


def truncated(row: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The distribution, written down token by token."""
    probabilities = (row.double() / temperature).softmax(-1)
    order = sorted(range(len(row)), key=lambda token: -float(probabilities[token]))
    if top_k:
        order = order[:top_k]
    total = sum(float(probabilities[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p * (total if top_k else 1.0):
            break
        mass += float(probabilities[token])
        if float(probabilities[token]) >= min_p * float(probabilities[order[0]]):
            kept.append(token)
    result = torch.zeros(len(row), dtype=torch.float64)
    result[kept] = probabilities[kept]
    return result / result.sum()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = torch.stack([logits(seed) for seed in range(6)])
    sequences = [
        sequence(seed=3),
        sequence(temperature=0.0),
        sequence(seed=5, top_p=0.5),
        sequence(seed=9, top_k=3, repetition_penalty=1.5),
        sequence(seed=1, min_p=0.2, presence_penalty=1.0),
        sequence(seed=2, logit_bias={4: 50.0}),
    ]
    together = sample(rows, sequences, EOS)
    assert together == [sample(rows[i : i + 1], sequences[i : i + 1], EOS)[0] for i in range(6)]
    assert together[::-1] == sample(rows.flip(0), sequences[::-1], EOS)


def test_a_large_vocabulary_gives_the_same_token_by_prefix_and_by_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.randn(5000, generator=torch.Generator().manual_seed(3))
    flat = [sequence(seed=seed, top_p=0.95) for seed in range(50)]  # 95 % of this row lie beyond any short prefix
    by_full_sort = sample(row.expand(50, -1), flat, EOS)
    monkeypatch.setattr("eightfold.engine.sampler._SORTED_PREFIX", 5000)
    assert sample(row.expand(50, -1), flat, EOS) == by_full_sort
    assert len(set(by_full_sort)) > 30


def test_the_same_seed_and_position_draw_the_same_token_again() -> None:
    row = logits(2)
    first = sample(row[None], [sequence(seed=11, output=(3, 4))], EOS)
    assert sample(row[None], [sequence(seed=11, output=(3, 4))], EOS) == first
    others = [sample(row[None], [sequence(seed=11, output=(3,) * n, temperature=3.0)], EOS)[0] for n in range(40)]
    assert len(set(others)) > 10


def test_logit_bias_is_added() -> None:
    row = logits()
    assert sample(row[None], [sequence(temperature=0.0, logit_bias={9: 100.0})], EOS) == [9]
    best = int(row.argmax())
    assert sample(row[None], [sequence(temperature=0.0, logit_bias={best: -100.0})], EOS) != [best]


def test_end_tokens_wait_for_min_tokens() -> None:
    row = torch.zeros(VOCAB)
    row[7], row[8], row[9] = 9.0, 8.0, 7.0
    for output, expected in (((1,), 9), ((1, 1), 7)):
        waiting = sequence(output=output, temperature=0.0, min_tokens=2, stop_token_ids=(8,))
        assert sample(row[None], [waiting], EOS) == [expected]


def test_penalties_by_formula() -> None:
    row = torch.zeros(VOCAB)
    row[1], row[3], row[5] = 4.0, -2.0, 3.9
    # 1 and 3 are in the prompt and the output, 5 in neither.
    assert sample(row[None], [sequence((1,), temperature=0.0, repetition_penalty=1.1)], EOS) == [5]
    assert sample(row[None], [sequence((1,), temperature=0.0, presence_penalty=1.0)], EOS) == [1]  # the prompt does not count
    assert sample(row[None], [sequence((2,), (1,), temperature=0.0, presence_penalty=0.05)], EOS) == [1]
    assert sample(row[None], [sequence((2,), (1, 1, 1), temperature=0.0, frequency_penalty=0.05)], EOS) == [5]
    # A negative logit becomes more negative: by dividing it would become likelier.
    low = torch.full((VOCAB,), -10.0)
    low[3], low[4] = -2.0, -2.1
    assert sample(low[None], [sequence((3,), temperature=0.0, repetition_penalty=2.0)], EOS) == [4]


def test_the_logits_are_not_written_to() -> None:
    row = logits()
    before = row.clone()
    sample(row[None], [sequence(output=(1,), temperature=0.0, presence_penalty=2.0, logit_bias={1: 5.0}, min_tokens=5)], EOS)
    assert torch.equal(row, before)


def test_logprobs_are_of_the_models_own_distribution() -> None:
    rows = torch.stack([logits(0), logits(1)])
    chosen = [3, int(rows[1].argmax())]
    found = token_logprobs(rows, chosen, 4)
    expected = rows.double().log_softmax(-1)
    for index, item in enumerate(found):
        assert item.token_id == chosen[index]
        assert math.isclose(item.logprob, float(expected[index, chosen[index]]), abs_tol=1e-5)
        assert item.rank == 1 + int((expected[index] > expected[index, chosen[index]]).sum())
        assert [token for token, _ in item.top] == expected[index].topk(4).indices.tolist()
    assert found[1].rank == 1
    assert token_logprobs(rows, chosen, 0)[0].top == ()
