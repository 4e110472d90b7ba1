"""How requests come about."""

from __future__ import annotations

from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.requests import make_request, mixed_seed, params_of_answers
from eightfold.types import Request, SamplingParams


def make(prompt: Any = (1, 2), params: SamplingParams | None = None, **changes: Any) -> Request:
    options: dict[str, Any] = {"context_length": 8, "vocab_size": 10, "sampling_defaults": {}, "seed": 5} | changes
    return make_request("a", prompt, params or SamplingParams(), **options)


def test_everything_is_decided() -> None:
    request = make([1, 2], SamplingParams(top_k=3), sampling_defaults={"temperature": 0.5, "top_k": 9})
    assert request.prompt_token_ids == (1, 2)
    assert (request.params.temperature, request.params.top_k, request.params.top_p) == (0.5, 3, 1.0)
    assert request.seed == 5
    assert make(params=SamplingParams(seed=7)).seed == 7


@pytest.mark.parametrize(
    ("prompt", "params", "what", "words"),
    [
        ([], {}, "prompt", "got no tokens; expected at least one token"),
        ([1] * 8, {}, "prompt", "got 8 tokens; expected at most 7, which leaves one for the answer within context_length 8"),
        ([1, 10], {}, "prompt token id", "got 10; expected a whole number from 0 to 9"),
        ([1, -1], {}, "prompt token id", "got -1"),
        ([True], {}, "prompt token id", "got True"),
        (["1"], {}, "prompt token id", "got '1'"),
        ([1], {"stop_token_ids": [10]}, "stop_token_ids", "got 10"),
        ([1], {"logit_bias": {11: 1.0}}, "logit_bias", "got 11"),
    ],
)
def test_what_no_model_can_take_is_refused(prompt: Any, params: dict[str, Any], what: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        make(prompt, SamplingParams(**params))
    assert caught.value.what == what
    assert words in str(caught.value)


def test_a_prompt_may_leave_room_for_one_token() -> None:
    assert len(make([1] * 7).prompt_token_ids) == 7


def test_each_answer_has_a_seed_of_its_own() -> None:
    each = params_of_answers(SamplingParams(n=3, seed=1, prompt_logprobs=2))
    assert each[0].seed == 1
    assert len({params.seed for params in each}) == 3
    assert [params.prompt_logprobs for params in each] == [2, None, None]
    assert each == params_of_answers(SamplingParams(n=3, seed=1, prompt_logprobs=2))
    assert [params.seed for params in params_of_answers(SamplingParams(n=2))] == [None, None]


def test_seeds_of_requests_differ_and_repeat() -> None:
    seeds = [mixed_seed(seed, counter) for seed in (0, 1) for counter in (1, 2, 3)]
    assert len(set(seeds)) == 6
    assert seeds[0] == mixed_seed(0, 1)
    assert all(0 <= seed < 2**64 for seed in seeds)
