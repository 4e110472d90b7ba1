"""OpenAI's batch format without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eightfold.batch import URLS, run_batch
from tests.pretended import check_idle, counting, make_llm, saying

CHAT, COMPLETION = URLS
MESSAGES = [{"role": "user", "content": "hello"}]


def line(custom_id: Any, url: str = COMPLETION, method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def run(llm: Any, lines: list[str]) -> tuple[list[dict[str, Any]], int]:
    written: list[str] = []
    num_failed = run_batch(llm, lines, written.append, names=("tiny",))
    check_idle(llm)
    assert all("\n" not in record for record in written)
    return [json.loads(record) for record in written], num_failed


def test_each_line_gets_its_answer_in_order() -> None:
    lines = [line(str(number), prompt="a", seed=number, max_tokens=1 + 7 * (number % 3)) for number in range(12)]
    records, num_failed = run(make_llm(counting(), max_running_requests=2), ["", *lines, "\n"])
    assert num_failed == 0
    assert [record["custom_id"] for record in records] == [str(number) for number in range(12)]
    assert len({record["id"] for record in records}) == 12
    letters = "abcdefghijklmnopqrstuvwxyz"
    for number, record in enumerate(records):
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        text = record["response"]["body"]["choices"][0]["text"]
        assert text == letters[number : number + 1 + 7 * (number % 3)]


def test_both_endpoints_are_answered() -> None:
    (chat, completion), _ = run(
        make_llm(saying("hello world")),
        [line("c", CHAT, messages=MESSAGES, model="tiny"), line("t", prompt="a", logprobs=1, echo=True)],
    )
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "hello world"
    assert completion["response"]["body"]["choices"][0]["text"] == "ahello world"
    assert completion["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"][:2] == [None, -2.0]


@pytest.mark.parametrize(
    ("bad", "status", "param", "words"),
    [
        ("not json", 400, "body", "broken JSON"),
        ("[]", 400, "line", "expected a JSON object"),
        (line(3, prompt="a"), 400, "custom_id", "got 3"),
        (line("first", prompt="a"), 400, "custom_id", "a text that no line before it has"),
        (line("a", method="GET", prompt="a"), 400, "method", "got 'GET'; expected POST"),
        (line("a", "/v1/embeddings", input="a"), 400, "url", "expected /v1/chat/completions or /v1/completions"),
        (line("a", prompt="a", max_tokns=1), 400, "max_tokns", "max_tokens, the nearest known field"),
        (line("a", prompt="a", stream=True), 400, "stream", "a batch has whole answers"),
        (line("a", CHAT, messages=MESSAGES, stream=True), 400, "stream", "a batch has whole answers"),
        (line("a", prompt="a" * 100), 400, "prompt", "got 101 tokens"),
        (line("a", prompt="a", model="other"), 404, "model", "expected tiny"),
        (json.dumps({"custom_id": "a", "method": "POST", "url": CHAT}), 400, "body", "got nothing"),
        (json.dumps({"custom_id": "a", "priority": 1}), 400, "priority", "unknown"),
    ],
)
def test_a_line_that_is_refused_is_told_and_the_others_go_on(bad: str, status: int, param: str, words: str) -> None:
    records, num_failed = run(make_llm(saying("x")), [line("first", prompt="a"), bad, line("last", prompt="a")])
    assert num_failed == 1
    assert [record["response"]["status_code"] for record in records] == [200, status, 200]
    error = records[1]["response"]["body"]["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_an_engine_that_breaks_ends_the_batch() -> None:
    def broken(sequence: Any) -> int:
        raise ZeroDivisionError("a fault")

    with pytest.raises(ZeroDivisionError):
        run_batch(make_llm(broken), [line("a", prompt="a"), line("b", prompt="a")], print, names=("tiny",))
