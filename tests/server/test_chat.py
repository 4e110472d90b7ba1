"""`/v1/chat/completions` over an engine whose answers the test writes down."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pretended import CONTEXT_LENGTH, check_idle, counting, make_llm, saying
from tests.server.inline import events, post
from tests.tiny_tokenizer import EOS_ID

PATH = "/v1/chat/completions"
TEXT = "hello wörld €!"
MESSAGES = [{"role": "user", "content": "hello"}]


def ask(llm: Any, **fields: Any) -> dict[str, Any]:
    response = post(llm, PATH, {"messages": MESSAGES} | fields)
    assert response.status_code == 200, response.text
    check_idle(llm)
    whole: dict[str, Any] = response.json()
    return whole


def streamed(llm: Any, **fields: Any) -> list[Any]:
    frames = events(post(llm, PATH, {"messages": MESSAGES, "stream": True} | fields))
    check_idle(llm)
    return frames


def put_together(frames: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream as the whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    for frame in frames:
        for part in frame["choices"]:
            if part["index"] not in choices:
                assert part["delta"] == {"role": "assistant", "content": ""}
                message = {"role": "assistant", "content": "", "refusal": None}
                choices[part["index"]] = {"index": part["index"], "message": message, "logprobs": None}
            choice = choices[part["index"]]
            assert choice.get("finish_reason") is None, "a choice goes on after its end"
            choice["message"]["content"] += part["delta"].get("content", "")
            if part["logprobs"] is not None:
                before = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"] = {"content": before["content"] + part["logprobs"]["content"], "refusal": None}
            choice["finish_reason"] = part["finish_reason"]
            choice["stop_reason"] = part.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def test_an_answer_has_openais_shape() -> None:
    whole = ask(make_llm(saying(TEXT)))
    assert whole["id"].startswith("chatcmpl-")
    assert whole["object"] == "chat.completion"
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": EOS_ID,
        }
    ]
    assert whole["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_completion_tokens": 4},
        {"stop": ["rld €"]},
        {"n": 3, "logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "stop": "wör"},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_the_pieces_of_a_stream_are_the_whole_answer(fields: dict[str, Any]) -> None:
    llm = make_llm(saying(TEXT))
    whole, frames = (
        ask(llm, **{name: value for name, value in fields.items() if name != "stream_options"}),
        streamed(llm, **fields),
    )
    assert put_together(frames) == whole["choices"]
    assert {frame["object"] for frame in frames} == {"chat.completion.chunk"}
    if "stream_options" in fields:
        assert frames[-1]["choices"] == []
        assert frames[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_an_answer_goes_on_to_the_end_of_the_context() -> None:
    whole = ask(make_llm(counting()))
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == CONTEXT_LENGTH


def test_an_answer_can_go_on_from_the_last_message() -> None:
    llm = make_llm(saying("x"))
    last = {"role": "assistant", "content": "he"}
    assert ask(llm, messages=[*MESSAGES, last], continue_final_message=True)["usage"]["prompt_tokens"] == 6


def test_log_probabilities_are_told_as_bytes_too() -> None:
    (choice,) = ask(make_llm(saying("hé")), logprobs=True)["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["h", "bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "hé"
    assert all(entry["logprob"] == -1.0 and entry["top_logprobs"] == [] for entry in content)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "got an empty list; expected at least one message"),
        ({"messages": [{"role": "user", "content": "a" * 80}]}, "messages", f"expected at most {CONTEXT_LENGTH - 1}"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "the model's chat template takes no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
        ({"tools": [{"type": "x"}]}, "tools[0].type", "got 'x'"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "got 5"),
    ],
)
def test_what_the_model_cannot_take_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        llm = make_llm(saying("x"))
        response = post(llm, PATH, {"messages": MESSAGES, "stream": stream} | fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert words in response.json()["error"]["message"]


def test_a_model_without_a_chat_template_says_so() -> None:
    response = post(make_llm(saying("x"), chat_template=None), PATH, {"messages": MESSAGES})
    assert response.status_code == 400
    assert "a tokenizer without a chat template" in response.json()["error"]["message"]


def test_another_model_is_not_found() -> None:
    assert post(make_llm(saying("x")), PATH, {"messages": MESSAGES, "model": "gpt-4"}).status_code == 404


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLING = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[-1].content }}{# <tool_call> #}"
THINKING = "{{ messages[-1].content }}<think>{# </think> <tool_call> <|im_start|> {{ tools }} #}"
CALL = 'so <tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pretended.CONTEXT_LENGTH", 256)


@pytest.mark.usefixtures("long_context")
def test_tool_calls_are_told_as_such() -> None:
    (choice,) = ask(make_llm(saying(CALL), chat_template=CALLING), tools=[WEATHER])["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "so", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}


@pytest.mark.usefixtures("long_context")
def test_tool_calls_are_streamed() -> None:
    frames = streamed(make_llm(saying(CALL), chat_template=CALLING), tools=[WEATHER], stream_options={"include_usage": True})
    deltas = [frame["choices"][0]["delta"] for frame in frames[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "so"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "weather"
    assert calls[0]["id"]
    assert len(calls) > 3
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert json.loads("".join(call["function"].get("arguments", "") for call in calls)) == {"city": "Köln"}
    assert frames[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.usefixtures("long_context")
def test_tools_that_are_not_to_be_called_are_not_told() -> None:
    llm = make_llm(saying(CALL), chat_template=CALLING)
    with_tools = ask(llm, tools=[WEATHER])["usage"]["prompt_tokens"]
    without = ask(llm, tools=[WEATHER], tool_choice="none")
    assert (without["usage"]["prompt_tokens"], with_tools) == (1, 7)
    assert without["choices"][0]["message"]["content"] == CALL


@pytest.mark.usefixtures("long_context")
def test_calls_after_the_first_can_be_held_back() -> None:
    llm = make_llm(saying(CALL + CALL), chat_template=CALLING)
    for parallel, num_calls in ((True, 2), (False, 1)):
        (choice,) = ask(llm, tools=[WEATHER], parallel_tool_calls=parallel)["choices"]
        assert len(choice["message"]["tool_calls"]) == num_calls


def test_reasoning_has_a_field_of_its_own() -> None:
    llm = make_llm(saying("hm, well</think>hello"), chat_template=THINKING)
    (choice,) = ask(llm)["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "reasoning_content": "hm, well",
    }
    frames = streamed(llm, logprobs=True)
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, well"
    assert "".join(delta.get("content", "") for delta in deltas) == "hello"
    logprobs = [entry for frame in frames if (told := frame["choices"][0]["logprobs"]) for entry in told["content"]]
    assert "".join(entry["token"] for entry in logprobs) == "hm, well</think>hello</s>"
