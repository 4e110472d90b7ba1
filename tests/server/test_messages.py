"""Conversations on their way to a chat template."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.messages import check_tools, encode_chat, in_limited_time, template_messages
from eightfold.server.protocol import ChatBody
from eightfold.text import Tokenizer
from tests import tiny_tokenizer
from tests.tiny_tokenizer import BOS_ID

PLAIN = tiny_tokenizer.make()
WITH_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for message in messages %}"
    "{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<{{ call.function.arguments.city }}>{% endfor %};{% endfor %}"
    "{% if think %}THINK{% endif %}{% if add_generation_prompt %}A:{% endif %}"
)
PICKY = tiny_tokenizer.CHAT_TEMPLATE + "{# tool #}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def with_parameters(schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def body(*messages: Any, **fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": list(messages), **fields})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def rendered(asked: ChatBody, tokenizer: Tokenizer = PLAIN, *, with_tools: bool = True, seconds: float = 5.0) -> str:
    token_ids = asyncio.run(encode_chat(tokenizer, asked, with_tools=with_tools, seconds=seconds))
    return tokenizer.decode(token_ids, skip_special_tokens=False)


def refusal(asked: ChatBody, tokenizer: Tokenizer = PLAIN, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        rendered(asked, tokenizer, **options)
    return caught.value


def test_a_conversation_has_one_bos_and_ends_where_the_answer_begins() -> None:
    token_ids = asyncio.run(encode_chat(PLAIN, body(user("hello")), with_tools=False))
    assert token_ids.count(BOS_ID) == 1
    assert rendered(body(user("hello"))) == "<s><|user|>hello</s><|assistant|>"
    assert rendered(body(user("hello"), add_generation_prompt=False)) == "<s><|user|>hello</s>"


def test_the_last_message_can_be_left_open() -> None:
    asked = body(user("hello"), {"role": "assistant", "content": "well"}, continue_final_message=True)
    assert rendered(asked) == "<s><|user|>hello</s><|assistant|>well"
    error = refusal(body(user("hello"), continue_final_message=True))
    assert error.what == "continue_final_message"
    both = ChatBody.model_validate({**asked.model_dump(), "add_generation_prompt": True})
    error = refusal(both)
    assert "add_generation_prompt false" in str(error)


def test_parts_of_text_become_lines() -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    assert template_messages(PLAIN, body(user(parts)))[0]["content"] == "hello\nworld"


def test_developers_are_the_system_where_the_template_does_not_know_them() -> None:
    developer = {"role": "developer", "content": "hello"}
    assert template_messages(PLAIN, body(developer))[0]["role"] == "system"
    knowing = tiny_tokenizer.make(chat_template="{{ messages[0].role }}{# developer #}")
    assert template_messages(knowing, body(developer))[0]["role"] == "developer"


def test_tool_calls_reach_the_template_as_objects() -> None:
    tokenizer = tiny_tokenizer.make(chat_template=WITH_TOOLS)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    asked = body(
        user("how"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "wet"},
        tools=[TOOL],
    )
    assert rendered(asked, tokenizer) == "[weather]user:how;assistant:<Bonn>;tool:wet;A:"
    assert rendered(asked, tokenizer, with_tools=False) == "user:how;assistant:<Bonn>;tool:wet;A:"


def test_tools_and_variables_that_have_no_effect_are_refused() -> None:
    asked = body(user("a"), tools=[TOOL])
    assert refusal(asked).what == "tools"
    tokenizer = tiny_tokenizer.make(chat_template=WITH_TOOLS)
    assert rendered(body(user("a"), chat_template_kwargs={"think": True}), tokenizer) == "user:a;THINKA:"
    for name in ("thnk", "messages", "chat_template", "tokenize", "bos_token"):
        error = refusal(body(user("a"), chat_template_kwargs={name: "x"}), tokenizer)
        assert error.what == f"chat_template_kwargs.{name}"
    assert refusal(body(user("a"), reasoning_effort="low"), tokenizer).what == "reasoning_effort"
    knowing = tiny_tokenizer.make(chat_template="{{ reasoning_effort }}!")
    assert rendered(body(user("a"), reasoning_effort="low"), knowing) == "low!"


@pytest.mark.parametrize(
    ("message", "what", "words"),
    [
        ({"content": "a"}, "messages[0].role", "got nothing; expected one of system"),
        ({"role": "robot", "content": "a"}, "messages[0].role", "got 'robot'"),
        ({"role": ["user"], "content": "a"}, "messages[0].role", "got ['user']"),
        ({"role": "user"}, "messages[0].content", "got nothing; expected a text"),
        ({"role": "assistant", "content": None}, "messages[0].content", "got nothing"),
        ({"role": "user", "content": 3}, "messages[0].content", "got 3"),
        ({"role": "user", "content": []}, "messages[0].content", "got []"),
        (user([{"type": "image_url", "image_url": {}}]), "messages[0].content[0].type", "got image_url; expected text: images"),
        (user([{"type": "text", "text": "a"}, {"type": "input_audio"}]), "messages[0].content[1].type", "got input_audio"),
        (user([{"type": "text"}]), "messages[0].content[0].text", "got nothing; expected a text"),
        (user(["a"]), "messages[0].content[0]", "got 'a'"),
        (user("a") | {"name": 5}, "messages[0].name", "got 5; expected a text"),
        (user("a") | {"audio": {"id": "x"}}, "messages[0].audio", "null: it is not supported"),
        (user([{"type": "text", "text": "a", "zz": 1}]), "messages[0].content[0].zz", "a field that is unknown"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}, "zz": 1}]},
            "messages[0].tool_calls[0].zz",
            "a field that is unknown",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "zz": 1}}]},
            "messages[0].tool_calls[0].function.zz",
            "a field that is unknown",
        ),
        (user([{"type": "novel"}]), "messages[0].content[0]", "expected a part such as"),
        ({"role": "assistant", "tool_calls": [{"function": 1}]}, "messages[0].tool_calls[0]", "expected a call such as"),
        ({"role": "assistant", "content": "", "tool_calls": 1}, "messages[0].tool_calls", "got 1; expected a list"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
            "broken JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "messages[0].tool_calls[0].function.arguments",
            "got []; expected a JSON object",
        ),
    ],
)
def test_malformed_messages_are_refused_by_path(message: Any, what: str, words: str) -> None:
    error = refusal(body(message), tiny_tokenizer.make(chat_template=WITH_TOOLS))
    assert error.what == what
    assert words in str(error)


def test_what_the_template_does_not_take_is_about_the_messages() -> None:
    assert refusal(body()).what == "messages"
    error = refusal(body({"role": "function", "content": "a"}), tiny_tokenizer.make(chat_template=PICKY))
    assert error.what == "messages"
    assert "no such role: function" in str(error)
    error = refusal(body(user("a")), tiny_tokenizer.make(chat_template=None))
    assert error.what == "messages"
    assert "a tokenizer without a chat template" in str(error)


def test_calls_and_results_that_the_template_has_no_place_for_are_refused() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    error = refusal(body(user("a"), {"role": "assistant", "content": "b", "tool_calls": [call]}))
    assert (error.what, error.expected) == ("messages[1].tool_calls", "none: the model's chat template takes no tools")
    for role in ("tool", "function"):
        assert refusal(body({"role": role, "tool_call_id": "1", "content": "wet"})).what == "messages[0].role"
    assert rendered(body({"role": "assistant", "content": "b", "tool_calls": []}))  # none at all


def test_what_clients_give_back_of_an_answer_is_tolerated() -> None:
    told: dict[str, Any] = {
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "name": None,
    }
    history = {"role": "assistant", "content": "b", "reasoning_content": "hm", "reasoning": None, **told}
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert rendered(body(user([cached]), history)) == "<s><|user|>a</s><|assistant|>b</s><|assistant|>"
    others: dict[str, Any] = {"name": "me", "id": "msg_1", "provider_specific_fields": {}, "function_call": None}
    assert rendered(body(user("a") | others)) == rendered(body(user("a")))
    declined = {"role": "assistant", "content": None, "refusal": "no"}
    assert "<|assistant|>no</s>" in rendered(body(user("a"), declined))


def test_fields_that_the_template_reads_reach_it() -> None:
    template = (
        "{% for message in messages %}{{ message['name'] }}:{{ message.reasoning_content }}:{{ message.mood }};{% endfor %}"
    )
    knowing = tiny_tokenizer.make(chat_template=template)
    assert rendered(body(user("a") | {"name": "me", "reasoning": "hm", "mood": "well"}), knowing) == "me:hm:well;"
    result = {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "wet"}  # the call names it already
    assert rendered(body(result), tiny_tokenizer.make(chat_template=WITH_TOOLS)) == "tool:wet;A:"


def test_a_template_that_never_ends_is_ended() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    error = refusal(body(user("a")), tiny_tokenizer.make(chat_template=endless), seconds=0.2)
    assert error.what == "messages"
    assert "ran for more than 0.2 s" in str(error)
    deadline = time.monotonic() + 20
    while any(thread.name == "chat template" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the template still runs"
        time.sleep(0.01)


def test_work_in_limited_time_returns_and_raises() -> None:
    assert asyncio.run(in_limited_time(lambda: 3, 5.0)) == 3

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(in_limited_time(fail, 5.0))


@pytest.mark.parametrize(
    ("tools", "what"),
    [
        ([{"type": "retrieval"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([TOOL, TOOL], "tools[1].function.name"),
        ([TOOL | {"zz": 1}], "tools[0].zz"),
        ([{"type": "function", "function": {"name": "f", "zz": 1}}], "tools[0].function.zz"),
        ([{"type": "function", "function": {"name": "f", "strict": "yes"}}], "tools[0].function.strict"),
        ([{"type": "function", "function": {"name": "f", "description": 5}}], "tools[0].function.description"),
        (with_parameters({"type": "wrong"}), "tools[0].function.parameters.type"),
        (with_parameters({"properties": {"a": {"type": ["string", 5]}}}), "tools[0].function.parameters.properties.a.type"),
        (with_parameters({"properties": {"a": 5}}), "tools[0].function.parameters.properties.a"),
        (with_parameters({"anyOf": {}}), "tools[0].function.parameters.anyOf"),
    ],
)
def test_malformed_tools_are_refused_by_path(tools: Any, what: str) -> None:
    with pytest.raises(InputError) as caught:
        check_tools(tools)
    assert caught.value.what == what


def test_tools_as_openai_describes_them_pass() -> None:
    check_tools([TOOL, {"type": "function", "function": {"name": "g"}}])
    check_tools([{"type": "function", "function": {"name": "g", "strict": True, "description": None, "parameters": None}}])
    # Nothing holds a free call to its schema, so that words which could not be enforced do no harm.
    check_tools(with_parameters({"properties": {"a": {"not": {}, "nullable": True}}, "uniqueItems": True, "if": {}}))
