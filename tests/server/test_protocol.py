"""Bodies: what is taken, and in which words the rest is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eightfold.errors import InputError
from eightfold.server.fields import TOLERATED
from eightfold.server.protocol import UNSUPPORTED, Body, ChatBody, CompletionBody, ControlBody, parse_body

MESSAGES = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionBody:
    return parse_body(json.dumps({"prompt": "hello"} | fields).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return parse_body(json.dumps({"messages": MESSAGES} | fields).encode(), ChatBody)


def test_every_field_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "seed": 11,
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "min_tokens": 2,
        "ignore_eos": True,
        "n": 3,
        "logprobs": 5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    params = completion(**fields, logit_bias={"3": 2, "4": -1.5}, best_of=3).params()
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == {3: 2.0, 4: -1.5}
    assert params.prompt_logprobs is None
    assert completion(echo=True, logprobs=1).params().prompt_logprobs == 1


def test_what_is_left_open_stays_open() -> None:
    params = completion(model=None, temperature=None, stop=None, max_tokens=None, stream_options=None).params()
    assert params == completion().params()
    assert params.temperature is None
    assert params.max_tokens == 16
    assert chat().params(100).max_tokens == 100
    assert chat(max_tokens=5).params(100).max_tokens == 5
    assert chat(max_completion_tokens=6).params(100).max_tokens == 6


def test_seeds_below_zero_are_seeds() -> None:
    assert completion(seed=-1).params().seed == 2**64 - 1
    assert completion(seed=2**64 - 1).params().seed == 2**64 - 1


def test_a_prompt_alone_is_one_token_that_is_not_told() -> None:
    params = completion(max_tokens=0, echo=True, logprobs=1, min_tokens=3).params()
    assert (params.max_tokens, params.min_tokens) == (1, 0)


def test_logprobs_of_chats_have_two_fields() -> None:
    assert chat().params(9).logprobs is None
    assert chat(logprobs=True).params(9).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params(9).logprobs == 3


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("user", ["me"], [5, {}]),
        ("metadata", [{}, {"a": "b"}], [5, {"a": 1}, "x"]),
        ("store", [True, False], ["yes", 1]),
        ("service_tier", ["auto", "default", "flex", "priority"], ["zzz", 1]),
        ("safety_identifier", ["me"], [5]),
        ("prompt_cache_key", ["me"], [["a"]]),
    ],
)
def test_what_cannot_change_an_answer_is_tolerated_where_it_makes_sense(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in (None, *good):
        assert completion(**{name: value}) == completion()
        assert chat(**{name: value}) == chat()
    for value in bad:
        with pytest.raises(InputError, match=f"{name}: got ") as caught:
            completion(**{name: value})
        assert caught.value.what == name


def test_every_tolerated_field_is_tested() -> None:
    assert sorted(TOLERATED) == ["metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"]


HUGE = (2**31, 2**63, 2**64, -(2**63) - 1, 10**30)


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(
    "name", ["top_k", "max_tokens", "min_tokens", "n", "stop_token_ids", "logit_bias", "logprobs", "best_of"]
)
def test_every_number_is_bounded(name: str, number: int) -> None:
    values: dict[str, Any] = {"stop_token_ids": [number], "logit_bias": {str(number): 1}}
    with pytest.raises(InputError) as caught:
        params_of(completion(**{name: values.get(name, number)}))
    assert caught.value.what == name


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs", "seed"])
def test_every_number_of_a_chat_is_bounded(name: str) -> None:
    with pytest.raises(InputError) as caught:
        params_of(chat(logprobs=True, **{name: 10**30}))
    assert caught.value.what == name


def test_what_steers_the_server_takes_its_own_fields_alone() -> None:
    class Steering(ControlBody):
        speed: int = 0

    assert parse_body(b'{"speed": 1}', Steering).speed == 1
    for name in ("user", "lora_path", "zz"):
        with pytest.raises(InputError, match=f"{name}: got a field that is unknown"):
            parse_body(json.dumps({name: None}).encode(), Steering)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_is_not_supported_passes_at_its_default_alone(name: str) -> None:
    for harmless in (None, *UNSUPPORTED[name]):
        assert completion(**{name: harmless}) == completion()
    with pytest.raises(InputError, match="This field is not supported") as caught:
        completion(**{name: "something else"})
    assert caught.value.what == name


BAD: list[tuple[type[Body], Any, str, str]] = [
    (CompletionBody, {}, "prompt", "got nothing; expected a text, a list of texts"),
    (CompletionBody, {"prompt": 3}, "prompt", "got 3; expected a text"),
    (CompletionBody, {"prompt": ["a", 3]}, "prompt", "expected a text, a list of texts"),
    (CompletionBody, {"prompt": [1, True]}, "prompt", "expected a text"),
    (CompletionBody, {"prompt": "a", "temprature": 1}, "temprature", "expected temperature, the nearest known field"),
    (CompletionBody, {"prompt": "a", "zzz": None}, "zzz", "got a field that is unknown; expected one of best_of"),
    (CompletionBody, {"prompt": "a", "messages": []}, "messages", "unknown"),
    (CompletionBody, {"prompt": "a", "max_tokens": "5"}, "max_tokens", "got '5'; expected a whole number"),
    (CompletionBody, {"prompt": "a", "max_tokens": 5.0}, "max_tokens", "got 5.0"),
    (CompletionBody, {"prompt": "a", "max_tokens": True}, "max_tokens", "got True"),
    (CompletionBody, {"prompt": "a", "max_tokens": -1}, "max_tokens", "got -1"),
    (CompletionBody, {"prompt": "a", "max_tokens": 0}, "max_tokens", "got 0; expected at least 1, or echo"),
    (CompletionBody, {"prompt": "a", "n": 0}, "n", "got 0; expected a whole number from 1 to 128"),
    (CompletionBody, {"prompt": "a", "n": 129}, "n", "got 129"),
    (CompletionBody, {"prompt": "a", "best_of": 2}, "best_of", "got 2; expected 1, the value of n"),
    (CompletionBody, {"prompt": "a", "temperature": -0.1}, "temperature", "got -0.1"),
    (CompletionBody, {"prompt": "a", "temperature": "hot"}, "temperature", "got 'hot'"),
    (CompletionBody, {"prompt": "a", "top_p": 1.1}, "top_p", "got 1.1; expected a number above 0 and at most 1"),
    (CompletionBody, {"prompt": "a", "presence_penalty": 3}, "presence_penalty", "expected a number in [-2, 2]"),
    (CompletionBody, {"prompt": "a", "logprobs": 21}, "logprobs", "got 21"),
    (CompletionBody, {"prompt": "a", "logprobs": True}, "logprobs", "got True"),
    (CompletionBody, {"prompt": "a", "seed": 2**64}, "seed", "expected a whole number from -2^63"),
    (CompletionBody, {"prompt": "a", "stop": ["x"] * 17}, "stop", "got 17 texts; expected at most 16"),
    (CompletionBody, {"prompt": "a", "stop": ""}, "stop", "not empty"),
    (CompletionBody, {"prompt": "a", "stop": ["x", 1]}, "stop", "expected a text, or a list"),
    (CompletionBody, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "expected token ids"),
    (CompletionBody, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "got 'x'; expected token ids"),
    (CompletionBody, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "[-100, 100]"),
    (CompletionBody, {"prompt": "a", "logit_bias": [1]}, "logit_bias", "got [1]; expected an object"),
    (CompletionBody, {"prompt": "a", "min_tokens": 20}, "min_tokens", "at most max_tokens, which is 16"),
    (CompletionBody, {"prompt": "a", "stream": "yes"}, "stream", "got 'yes'; expected true or false"),
    (
        CompletionBody,
        {"prompt": "a", "stream_options": {"includ_usage": True}},
        "stream_options.includ_usage",
        "stream_options.include_usage",
    ),
    (CompletionBody, {"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "got 1"),
    (CompletionBody, {"prompt": "a", "stream_options": 1}, "stream_options", "got 1; expected an object"),
    (
        CompletionBody,
        {"prompt": "a", "suffix": "x"},
        "suffix",
        "got 'x'; expected nothing or \"\". This field is not supported.",
    ),
    (CompletionBody, {"prompt": "a", "use_beam_search": 0}, "use_beam_search", "expected nothing or false"),
    (ChatBody, {}, "messages", "got nothing; expected a list of objects"),
    (ChatBody, {"messages": "hello"}, "messages", "got 'hello'"),
    (ChatBody, {"messages": ["hello"]}, "messages[0]", "got 'hello'"),
    (ChatBody, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", 'expected "logprobs": true beside it'),
    (ChatBody, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21"),
    (ChatBody, {"messages": MESSAGES, "logprobs": 2}, "logprobs", "got 2; expected true or false"),
    (ChatBody, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
    (ChatBody, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "got 1; expected 2"),
    (ChatBody, {"messages": MESSAGES, "echo": True}, "echo", "got True; expected false"),
    (ChatBody, {"messages": MESSAGES, "tool_choice": "maybe"}, "tool_choice", "got 'maybe'"),
    (ChatBody, {"messages": MESSAGES, "prompt": "a"}, "prompt", "unknown"),
]


def params_of(body: Body) -> object:
    return body.params(50) if isinstance(body, ChatBody) else body.params() if isinstance(body, CompletionBody) else None


@pytest.mark.parametrize(("kind", "value", "what", "words"), BAD)
def test_bad_fields_are_refused_by_name(kind: type[Body], value: Any, what: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        params_of(parse_body(json.dumps(value).encode(), kind))
    assert caught.value.what == what
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "broken JSON"),
        (b"{", "broken JSON"),
        (b'{"prompt": "a"} x', "broken JSON"),
        (b'{"prompt": "\xff"}', "broken JSON"),
        (b'{"prompt": "\\ud800"}', "got \\ud800, half of a surrogate pair, at byte 12"),
        (b'{"prompt": "\\udc00 \\ud83d\\ude00"}', "got \\udc00, half of a surrogate pair, at byte 12"),
        (b'{"prompt": "a", "temperature": NaN}', "broken JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "broken JSON"),
        (b"[" * 100_000, "broken JSON"),
        (b"[]", "got []; expected a JSON object"),
        (b'"prompt"', "expected a JSON object"),
        (b"null", "got nothing; expected a JSON object"),
    ],
)
def test_what_is_no_object_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_body(raw, CompletionBody)
    assert caught.value.what == "body"
    assert words in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KNOWN = {*CompletionBody.model_fields, *ChatBody.model_fields, *UNSUPPORTED, *TOLERATED}
NAMES = st.sampled_from(sorted(KNOWN)) | st.text(max_size=8)


def refusal(raw: bytes, kind: type[Body]) -> InputError | None:
    try:
        params_of(parse_body(raw, kind))
    except InputError as error:
        return error
    return None


@given(value=st.dictionaries(NAMES, JSON, max_size=5), kind=st.sampled_from([CompletionBody, ChatBody]))
def test_any_object_is_taken_or_refused_by_name(value: dict[str, Any], kind: type[Body]) -> None:
    raw = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    error = refusal(raw, kind)
    assert error is None or error.what in value or re.split(r"[.\[]", error.what)[0] in {"body", "prompt", "messages", *value}


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(raw: bytes) -> None:
    error = refusal(raw, CompletionBody)
    assert error is None or error.what
