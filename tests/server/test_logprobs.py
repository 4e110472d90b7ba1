"""Log probabilities in OpenAI's shapes."""

from __future__ import annotations

import math

from eightfold.server.logprobs import LOWEST, chat_logprobs, completion_logprobs, joined, prompt_logprobs, token_text
from eightfold.types import TokenLogprobs
from tests import tiny_tokenizer

TOKENIZER = tiny_tokenizer.make()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_token_is_its_text_or_its_bytes() -> None:
    assert token_text(b" hello") == " hello"
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xe2\x82") == "bytes:\\xe2\\x82"
    assert token_text(b"") == ""


def test_the_token_that_stands_there_is_among_the_likeliest() -> None:
    hello, other, chosen = 264, ids("a")[0], ids("b")[0]
    item = TokenLogprobs(chosen, -5.0, 3, ((hello, -0.5), (other, -1.0)))
    told = completion_logprobs(TOKENIZER, [item], [3], start=4)
    assert told == {
        "tokens": ["b"],
        "token_logprobs": [-5.0],
        "top_logprobs": [{"b": -5.0, "a": -1.0, "hello": -0.5}],
        "text_offset": [7],
    }
    assert max(told["top_logprobs"][0].values()) == -0.5


def test_what_is_impossible_can_be_told() -> None:
    item = TokenLogprobs(264, -math.inf, 1, ((264, -math.inf),))
    assert completion_logprobs(TOKENIZER, [item], [0])["token_logprobs"] == [LOWEST]
    (entry,) = chat_logprobs(TOKENIZER, [item], 1)
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == LOWEST


def test_chats_have_as_many_alternatives_as_were_asked_for() -> None:
    item = TokenLogprobs(264, -0.5, 1, ((264, -0.5), (ids("a")[0], -1.0)))
    assert chat_logprobs(TOKENIZER, [item], 0)[0]["top_logprobs"] == []
    assert chat_logprobs(TOKENIZER, [item], 2)[0]["top_logprobs"] == [
        {"token": "hello", "logprob": -0.5, "bytes": list(b"hello")},
        {"token": "a", "logprob": -1.0, "bytes": [97]},
    ]


def test_the_first_token_of_a_prompt_has_none() -> None:
    prompt = TOKENIZER.encode("hé he")
    told = prompt_logprobs(TOKENIZER, prompt, [TokenLogprobs(token, -1.0, 1, ()) for token in prompt[1:]])
    assert told["tokens"] == ["<s>", "h", "bytes:\\xc3", "bytes:\\xa9", " ", "he"]
    assert told["token_logprobs"] == [None, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert told["text_offset"] == [0, 0, 1, 1, 2, 3]


def test_parts_are_put_together_by_name() -> None:
    assert joined([{"a": [1], "b": []}, {"a": [2], "b": [3]}]) == {"a": [1, 2], "b": [3]}
