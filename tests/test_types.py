"""Parameters check themselves, and the plain data counts right."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.types import NEUTRAL_SAMPLING, Batch, Chunk, Grammar, Request, SamplingParams, Sequence


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 1.0},
        {"repetition_penalty": 0.5, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100, 7: 100.0}, "seed": 2**64 - 1},
        {"stop": ["a", "b"], "stop_token_ids": [3], "n": 128, "logprobs": 0, "prompt_logprobs": 20},
    ],
)
def test_good_values_are_taken(values: dict[str, Any]) -> None:
    SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1.5, True, "5", None)),
        *(("temperature", value) for value in (-0.1, math.nan, math.inf, "hot", True)),
        *(("top_p", value) for value in (0, 1.01, -1, math.nan)),
        *(("top_k", value) for value in (-2, 1.0, True)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("repetition_penalty", value) for value in (0, -1, math.inf)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan, None)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1)),
        *(("logit_bias", value) for value in ({-1: 0}, {1: 101}, {1: math.nan}, {"1": 1}, {True: 1}, [1], "1")),
        *(("seed", value) for value in (-1, 2**64, 0.5)),
        *(("stop", value) for value in ("", [""], [1], 5, {"a": 1}, b"a")),
        *(("stop_token_ids", value) for value in ([-1], ["1"], 5, "12", [True])),
        *(("min_tokens", value) for value in (-1, 129)),
        *(("n", value) for value in (0, 129, None)),
        *(("logprobs", value) for value in (-1, 21, True)),
        *(("prompt_logprobs", value) for value in (-1, 21)),
        ("grammar", {}),
        ("grammar", "a+"),
        *(
            (name, value)
            for value in ("yes", None)
            for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
        ),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: value})


def test_lists_become_tuples_and_one_stop_text_is_a_list_of_one() -> None:
    values: dict[str, Any] = {"stop": "END", "stop_token_ids": [3, 4], "logit_bias": {1: 2.0}}
    params = SamplingParams(**values)
    assert (params.stop, params.stop_token_ids) == (("END",), (3, 4))
    values["logit_bias"][1] = 500
    assert params.logit_bias == {1: 2.0}


def test_parameters_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_p = 0.5  # type: ignore[misc]


def test_what_is_unset_comes_from_the_checkpoint_then_from_the_neutral_values() -> None:
    resolved = SamplingParams(top_k=5).resolved({"temperature": 0.6, "top_k": 40})
    assert (resolved.temperature, resolved.top_k) == (0.6, 5)
    assert {name: getattr(resolved, name) for name in ("top_p", "min_p", "repetition_penalty")} == {
        name: NEUTRAL_SAMPLING[name] for name in ("top_p", "min_p", "repetition_penalty")
    }


def test_a_sequence_counts_its_tokens() -> None:
    sequence = Sequence.start(Request("r", (1, 2, 3), SamplingParams(), seed=0))
    sequence.num_computed_tokens = 3
    sequence.token_ids.append(4)
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens, sequence.num_remaining_tokens) == (3, 1, 1)
    assert sequence.request.prompt_token_ids == (1, 2, 3)
    assert Batch((Chunk(sequence, 3, 1, samples=True), Chunk(sequence, 0, 2, samples=False))).num_tokens == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar("ebnf", "a"), "grammar.kind: got 'ebnf'; expected one of json_schema, regex, lark"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", 5), "grammar.text: got 5; expected a text"),  # type: ignore[arg-type]
        (lambda: Grammar("regex", "a", None), "grammar.begin_after: got None; expected a text"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema({"a": {1, 2}}), "json_schema: got Object of type set .*; expected what can be written"),
        (
            lambda: SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True),
            "ignore_eos: got True; expected false beside a gr",
        ),
    ],
)
def test_a_bad_grammar_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_grammar_is_plain_data() -> None:
    grammar = Grammar.json_schema({"type": "string", "const": "é"}, begin_after="</think>")
    assert grammar == Grammar("json_schema", '{"type": "string", "const": "é"}', "</think>")
    assert hash(grammar) == hash(Grammar("json_schema", '{"type": "string", "const": "é"}', "</think>"))
    assert SamplingParams(grammar=grammar).resolved({}).grammar is grammar
