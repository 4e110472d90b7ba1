"""SGLang's routes over an engine whose answers the test writes down."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.pretended import VOCAB_SIZE, check_idle, make_llm, saying
from tests.server.inline import events, post
from tests.tiny_tokenizer import BOS_ID, EOS_ID

TEXT = "hello wörld €!"


def ask(path: str, body: dict[str, Any], status: int = 200, said: str = TEXT) -> Any:
    llm = make_llm(saying(said))
    response = post(llm, path, body)
    assert response.status_code == status, response.text
    check_idle(llm)
    return response.json()


def test_generate_has_sglangs_shape() -> None:
    told = ask("/generate", {"text": "hello", "rid": "mine"})
    assert told["text"] == TEXT
    assert told["output_ids"][-1] == EOS_ID
    assert told["meta_info"].pop("e2e_latency") > 0
    assert told["meta_info"] == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS_ID},
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "cached_tokens": 0,
    }


def test_generate_takes_sglangs_parameters() -> None:
    params = {"max_new_tokens": 5, "min_new_tokens": 1, "temperature": 0, "stop": None, "spaces_between_special_tokens": True}
    told = ask("/generate", {"input_ids": [BOS_ID, 6], "sampling_params": params, "lora_path": None})
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    told = ask("/generate", {"text": "a", "sampling_params": {"stop": "wö", "no_stop_trim": True}})
    assert told["text"] == "hello wö"
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wö"}


def test_no_tokens_compute_the_prompt_alone() -> None:
    params = {"max_new_tokens": 0}
    told = ask("/generate", {"text": "hello", "sampling_params": params, "return_logprob": True, "logprob_start_len": 0})
    assert (told["text"], told["output_ids"]) == ("", [])
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert told["meta_info"]["completion_tokens"] == 0
    assert len(told["meta_info"]["input_token_logprobs"]) == told["meta_info"]["prompt_tokens"] == 2
    (frame,) = events(post(make_llm(saying(TEXT)), "/generate", {"text": "a", "stream": True, "sampling_params": params}))
    assert frame["text"] == ""


def test_tokenize_takes_a_prompt_or_messages() -> None:
    refused = ask("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400)
    assert refused["error"]["message"] == "prompt: got both of prompt and messages; expected one of the two"


def test_several_prompts_get_a_list() -> None:
    told = ask("/generate", {"text": ["hello", "a"], "sampling_params": {"n": 2}})
    assert [item["text"] for item in told] == [TEXT] * 4
    assert len({item["meta_info"]["id"] for item in told}) == 4
    assert isinstance(ask("/generate", {"input_ids": [[5, 6]]}), list)
    assert isinstance(ask("/generate", {"text": ["a"]}), list)


def test_a_stream_tells_all_the_text_each_time() -> None:
    frames = events(post(make_llm(saying(TEXT)), "/generate", {"text": "hello", "stream": True}))
    texts = [frame["text"] for frame in frames]
    assert texts[:3] == ["hello", "hello w", "hello wö"]
    assert all(longer.startswith(text) for text, longer in pairwise(texts))
    assert (texts[-1], frames[-1]["meta_info"]["finish_reason"]["type"]) == (TEXT, "stop")
    batch = events(post(make_llm(saying(TEXT)), "/generate", {"text": ["a", "b"], "stream": True}))
    assert {frame["index"] for frame in batch} == {0, 1}


@pytest.mark.parametrize(
    ("start", "told"), [(-1, None), (0, [[None, 1, "<s>"], [-2.0, 264, "hello"]]), (1, [[-2.0, 264, "hello"]])]
)
def test_log_probabilities_are_triples(start: int, told: Any) -> None:
    asked = {"text": "hello", "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
    meta = ask("/generate", asked | {"return_text_in_logprobs": True}, said="x")["meta_info"]
    assert meta.get("input_token_logprobs") == told
    assert meta["output_token_logprobs"] == [[-1.0, 92, "x"], [-1.0, EOS_ID, "</s>"]]
    assert meta["output_top_logprobs"] == [[], []]
    assert "output_token_logprobs" not in ask("/generate", {"text": "hello"})["meta_info"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text", "got neither of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, "text", "got both"),
        ({"text": []}, "text", "got an empty list"),
        ({"text": ["a", "b" * 80]}, "text[1]", "got 81 tokens"),
        ({"input_ids": [VOCAB_SIZE]}, "input_ids", f"got {VOCAB_SIZE}"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "got -1"),
        ({"text": "a", "sampling_params": {"sampling_seed": 10**30}}, "sampling_params.sampling_seed", "2^64 - 1"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex", "expected one that can be enforced"),
        ({"text": "a", "sampling_params": {"regex": "[^\\s\\S]"}}, "sampling_params.regex", "no token leads on"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "expected an object of sampling parameters, for all"),
        ({"text": ["a"], "rid": ["b"]}, "rid", "expected a text, which comes back"),
        ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens", "unknown"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature", "got 'x'"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params", "got [{}]"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex", "not supported"),
        ({"text": "a", "image_data": "x"}, "image_data", "not supported"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 50}, "top_logprobs_num", "got 50"),
    ],
)
def test_what_generate_does_not_take_is_refused(body: dict[str, Any], param: str, words: str) -> None:
    error = ask("/generate", body, 400)["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_texts_become_tokens_and_tokens_texts() -> None:
    assert ask("/tokenize", {"prompt": "hello"}) == {"tokens": [BOS_ID, 264], "count": 2, "max_model_len": 64}
    assert ask("/tokenize", {"prompt": "hello", "add_special_tokens": False})["tokens"] == [264]
    assert ask("/tokenize", {"prompt": ["hello", "a"]})["count"] == [2, 2]
    assert ask("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})["count"] == 5
    assert ask("/detokenize", {"tokens": [BOS_ID, 264]}) == {"text": "<s>hello", "prompt": "<s>hello"}
    assert ask("/detokenize", {"tokens": [BOS_ID, 264], "skip_special_tokens": True})["text"] == "hello"
    assert ask("/detokenize", {"tokens": [[264], [264, 264]]})["text"] == ["hello", "hellohello"]
    assert ask("/detokenize", {"tokens": []})["text"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_what_they_do_not_take_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    assert ask(path, body, 400)["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", {"text": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})],
)
def test_another_model_is_not_found(path: str, body: dict[str, Any]) -> None:
    assert ask(path, body | {"model": "other"}, 404)["error"]["code"] == "model_not_found"
