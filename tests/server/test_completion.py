"""`/v1/completions` over an engine whose answers the test writes down."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pretended import CONTEXT_LENGTH, VOCAB_SIZE, check_idle, counting, make_llm, saying
from tests.server.inline import events, post
from tests.tiny_tokenizer import BOS_ID

PATH = "/v1/completions"
TEXT = "hello wörld €!"


def ask(llm: Any, **fields: Any) -> dict[str, Any]:
    response = post(llm, PATH, {"prompt": "hello", "max_tokens": 30} | fields)
    assert response.status_code == 200, response.text
    check_idle(llm)
    whole: dict[str, Any] = response.json()
    return whole


def streamed(llm: Any, **fields: Any) -> list[Any]:
    frames = events(post(llm, PATH, {"prompt": "hello", "max_tokens": 30, "stream": True} | fields))
    check_idle(llm)
    return frames


def refused(llm: Any, status: int = 400, **fields: Any) -> dict[str, Any]:
    response = post(llm, PATH, {"prompt": "hello"} | fields)
    assert response.status_code == status, response.text
    check_idle(llm)
    error: dict[str, Any] = response.json()["error"]
    return error


def put_together(frames: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream as the whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        for part in frame["choices"]:
            choice = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            assert choice.get("finish_reason") is None, "a choice goes on after its end"
            choice["text"] += part["text"]
            if part["logprobs"] is not None:
                before = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                choice["logprobs"] = {name: before[name] + values for name, values in part["logprobs"].items()}
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def test_an_answer_has_openais_shape() -> None:
    whole = ask(make_llm(saying(TEXT)))
    assert whole["id"].startswith("cmpl-")
    assert whole["object"] == "text_completion"
    assert whole["model"] == "tiny"
    assert whole["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": 2}]
    assert whole["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


FIELDS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 4},
    {"stop": "€"},
    {"stop": ["rld €", "zzz"]},
    {"stop": "wör", "include_stop_str_in_output": True},
    {"stop": "hello"},
    {"logprobs": 0},
    {"logprobs": 2, "echo": True},
    {"logprobs": 2, "echo": True, "max_tokens": 0},
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"n": 3},
    {"n": 2, "best_of": 2, "prompt": ["hello", "he"], "logprobs": 1, "echo": True},
    {"prompt": [BOS_ID, 6, 7], "echo": True},
    {"prompt": [[BOS_ID, 6], [7]]},
    {"skip_special_tokens": False},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_the_pieces_of_a_stream_are_the_whole_answer(fields: dict[str, Any]) -> None:
    llm = make_llm(saying(TEXT))
    whole, frames = (
        ask(llm, **{name: value for name, value in fields.items() if name != "stream_options"}),
        streamed(llm, **fields),
    )
    assert put_together(frames) == whole["choices"]
    assert {(frame["object"], frame["model"]) for frame in frames} == {("text_completion", "tiny")}
    assert len({frame["id"] for frame in frames}) == 1


def test_a_stream_comes_in_pieces_and_without_half_characters() -> None:
    texts = [frame["choices"][0]["text"] for frame in streamed(make_llm(saying(TEXT)))]
    assert texts == ["hello", " w", "ö", "r", "l", "d", " ", "€", "!", ""]


def test_stop_texts_never_leak() -> None:
    llm = make_llm(saying("hello world"))
    for stop, text in (("o w", "hell"), ("world", "hello "), ("hello", ""), ("x", "hello world")):
        frames = streamed(llm, stop=stop)
        assert "".join(frame["choices"][0]["text"] for frame in frames) == text
        assert frames[-1]["choices"][0]["stop_reason"] == (2 if stop == "x" else stop)


def test_usage_comes_last_and_where_asked_for_always() -> None:
    llm = make_llm(saying(TEXT))
    *frames, last = streamed(llm, stream_options={"include_usage": True})
    assert all(frame["usage"] is None for frame in frames)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    *frames, last = streamed(llm, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 12
    assert all("usage" not in frame for frame in streamed(llm))


def test_cached_tokens_are_counted() -> None:
    llm = make_llm(saying("x"))
    prompt = list(range(5, 45))
    assert ask(llm, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    usage = ask(llm, prompt=prompt)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32
    assert usage["prompt_tokens"] == 40


def test_further_answers_find_the_prompt_in_the_cache() -> None:
    llm = make_llm(saying("x"))
    usage = ask(llm, prompt=list(range(5, 45)), n=3)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 6)
    assert llm.engine.scheduler.counters.prefix_hits == 64


def test_seeds_are_those_of_the_python_interface() -> None:
    llm = make_llm(counting())
    texts = [choice["text"] for choice in ask(llm, seed=5, n=3, max_tokens=4)["choices"]]
    assert texts[0] == "fghi"
    assert len(set(texts)) > 1
    assert texts == [choice["text"] for choice in ask(llm, seed=5, n=3, max_tokens=4)["choices"]]
    assert ask(llm, seed=5 - 26, max_tokens=4)["choices"][0]["text"] != ""


def test_log_probabilities_have_places_in_the_text() -> None:
    (choice,) = ask(make_llm(saying(TEXT)), logprobs=1, echo=True)["choices"]
    told = choice["logprobs"]
    assert choice["text"] == "hello" + TEXT
    assert told["tokens"][:5] == ["<s>", "hello", "hello", " w", "bytes:\\xc3"]
    assert told["token_logprobs"][:3] == [None, -2.0, -1.0]
    assert told["top_logprobs"][:3] == [None, {"hello": -2.0}, {"hello": -1.0}]
    assert len({len(values) for values in told.values()}) == 1
    for token, offset in zip(told["tokens"][1:-1], told["text_offset"][1:-1], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


def test_a_prompt_can_be_scored_alone() -> None:
    whole = ask(make_llm(saying(TEXT)), prompt=[BOS_ID, 6, 7], logprobs=1, echo=True, max_tokens=0)
    (choice,) = whole["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0]
    assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0


def test_every_answer_begins_with_its_prompt() -> None:
    choices = ask(make_llm(saying("x")), prompt=[[BOS_ID, 264], [6, 7]], n=2, echo=True, logprobs=0)["choices"]
    assert [choice["text"] for choice in choices] == ["hellox", "hellox", '"#x', '"#x']
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": []}, "prompt", "got an empty list"),
        ({"prompt": [[]]}, "prompt[0]", "got no tokens"),
        ({"prompt": ["a", "b" * 80]}, "prompt[1]", f"got 81 tokens; expected at most {CONTEXT_LENGTH - 1}"),
        ({"prompt": "b" * 80}, "prompt", f"got 81 tokens; expected at most {CONTEXT_LENGTH - 1}"),
        ({"prompt": "b" * 10_000}, "prompt", "got 10000 characters; expected at most"),
        ({"prompt": [VOCAB_SIZE]}, "prompt", f"got {VOCAB_SIZE}; expected a whole number from 0 to {VOCAB_SIZE - 1}"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", f"got {VOCAB_SIZE}"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias", f"got {VOCAB_SIZE}"),
        ({"prompt": ["a"] * 100, "n": 100}, "n", "got 100 answers for each of 100 prompts; expected at most 4096 in all"),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
    ],
)
def test_what_the_model_cannot_take_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        error = refused(make_llm(saying("x")), stream=stream, **fields)
        assert error["param"] == param
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    for prompt in ("b" * 80, "b" * 10_000, [5] * 80):
        assert refused(make_llm(saying("x")), prompt=prompt)["code"] == "context_length_exceeded"


def test_another_model_is_not_found() -> None:
    llm = make_llm(saying("x"))
    error = refused(llm, 404, model="gpt-4")
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert ask(llm, model="tiny")["model"] == "tiny"
