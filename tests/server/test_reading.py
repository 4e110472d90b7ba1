"""How the answers to a chat are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.answers import Serving
from eightfold.server.inprocess import serving_in_process
from eightfold.server.protocol import ChatBody
from eightfold.server.reading import chat_formats, offered_tools, reading_of
from eightfold.server.tools.deltas import gather
from tests import tiny_tokenizer
from tests.grammar.masks import permitted
from tests.pretended import make_llm, saying

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HERMES = "{{ tools }}{{ messages[0].content }}{# <tool_call> #}"
THINKING = "{{ messages[0].content }}{# <|im_start|> #}{% if think is not defined %}<think>{% endif %}{# </think> #}"


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}]} | fields)


def serving(template: str) -> Serving:
    llm = make_llm(saying("x"), chat_template=template)
    return serving_in_process(llm.engine, llm.tokenizer, ["tiny"])


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        (tiny_tokenizer.CHAT_TEMPLATE, (None, None)),
        (None, (None, None)),
        (HERMES, (None, "hermes")),
        (THINKING, ("qwen3", None)),
    ],
)
def test_the_template_shows_the_formats(template: str | None, formats: Any) -> None:
    assert chat_formats(tiny_tokenizer.make(chat_template=template)) == formats


def test_a_user_can_name_them() -> None:
    tokenizer = tiny_tokenizer.make(chat_template=HERMES)
    assert chat_formats(tokenizer, "deepseek-r1", "mistral") == ("deepseek-r1", "mistral")
    assert chat_formats(tokenizer, "none", "none") == (None, None)
    assert chat_formats(tokenizer, None, "qwen25") == (None, "hermes")
    for named in ({"reasoning": "x"}, {"tools": "x"}):
        with pytest.raises(InputError, match="_parser: got x; expected one of"):
            chat_formats(tokenizer, **named)


def test_most_answers_are_their_text() -> None:
    reading = reading_of(serving(tiny_tokenizer.CHAT_TEMPLATE), body(), [5])
    assert (reading.make_parser, reading.shown, reading.grammar) == (None, frozenset(), None)
    assert reading_of(serving(HERMES), body(), [5]).make_parser is None


def test_a_grammar_begins_after_the_reasoning() -> None:
    thinking = serving(THINKING)
    encode = thinking.tokenizer.encode
    asked = body(response_format={"type": "json_object"})

    def tags(prompt: str, asked: ChatBody = asked, serving: Serving = thinking) -> tuple[str, str]:
        grammar = reading_of(serving, asked, encode(prompt)).grammar
        assert grammar is not None
        return grammar.begin_after, grammar.opened_by

    assert tags("a<think>\n") == ("</think>", "")
    assert tags("a") == ("</think>", "<think>")
    assert tags("a<think>\n\n</think>\n\n") == ("", "")
    messages = [{"role": "assistant", "content": "a"}]
    assert tags("a", asked.model_copy(update={"messages": messages, "continue_final_message": True})) == ("", "")
    # Without a grammar such a model thinks in any case; under one it says so.
    always = replace(thinking, reasoning="deepseek-r1")
    assert tags("a", serving=always) == ("</think>", "<think>")
    assert tags("a<think>", serving=always) == ("</think>", "")
    choice = body(tools=[TOOL], tool_choice="required")
    assert tags("a", choice, replace(thinking, tools="hermes")) == ("</think>", "<think>")
    assert tags("a", choice, replace(thinking, tools="gpt-oss", reasoning="gpt-oss")) == ("", "")


@pytest.mark.parametrize(
    ("answer", "content", "reasoning"),
    [
        ("42", "42", ""),
        ("\n\n42", "42", ""),
        ("<think>\nHm.\n</think>\n\n42", "42", "Hm."),
        ("<think>Hm", "", "Hm"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
def test_what_is_held_to_a_grammar_is_content_unless_it_says_that_it_thinks(
    name: str, answer: str, content: str, reasoning: str
) -> None:
    thinking = replace(serving(THINKING), reasoning=name)
    reading = reading_of(thinking, body(guided_regex="[0-9]+"), thinking.tokenizer.encode("a"))
    assert reading.make_parser is not None
    parser = reading.make_parser()
    parsed = gather([*parser.push(answer), *parser.finish()])
    assert (parsed.content, parsed.reasoning) == (content, reasoning)


def test_whoever_does_not_think_is_held_to_a_grammar() -> None:
    """The whole way: a model that would say "no" has to say a number, in both shapes of a structure."""
    llm = make_llm(saying("x"), chat_template=THINKING)
    thinking = serving_in_process(llm.engine, llm.tokenizer, ["tiny"])
    for fields, good, bad in (
        ({"guided_regex": "[0-9]+"}, "7", "n"),
        ({"response_format": {"type": "json_object"}}, "{", "n"),
        ({"tools": [TOOL], "tool_choice": "required"}, "<", "n"),
    ):
        grammar = reading_of(replace(thinking, tools="hermes"), body(**fields), thinking.tokenizer.encode("a")).grammar
        assert grammar is not None
        assert llm.engine.grammar_compiler is not None
        first = permitted(llm.engine.grammar_compiler.compile(grammar).mask([]))
        encode = thinking.tokenizer.encode
        assert encode(good, add_special_tokens=False)[0] in first
        assert encode("<", add_special_tokens=False)[0] in first
        assert encode(bad, add_special_tokens=False)[0] not in first
        assert tiny_tokenizer.EOS_ID not in first


def test_tools_are_offered_unless_they_are_not_to_be_called() -> None:
    for choice in (None, "auto"):
        assert offered_tools(body(tools=[TOOL], tool_choice=choice)) == [TOOL]
    assert offered_tools(body(tools=[TOOL], tool_choice="none")) == ()
    assert not offered_tools(body())
    assert offered_tools(body(tool_choice="none")) == ()


@pytest.mark.parametrize(
    ("fields", "what", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "since there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "since there are no tools"),
        ({"tools": [TOOL], "tool_choice": {"name": "f"}}, "tool_choice", '"required", or {"type": "function"'),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
            "got 'f'; expected one of the tools: weather",
        ),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools", "tools beside a grammar"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(fields: dict[str, Any], what: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        reading_of(serving(HERMES), body(**fields), [5])
    assert caught.value.what == what
    assert words in str(caught.value)


def test_a_call_can_be_demanded() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choices: list[Any] = ["required", named]
    for choice in choices:
        grammar = reading_of(serving(HERMES), body(tools=[TOOL], tool_choice=choice), [5]).grammar
        assert grammar is not None
        assert "<tool_call>" in grammar.text
    assert reading_of(serving(HERMES), body(tools=[TOOL]), [5]).grammar is None


def test_tools_of_a_model_without_a_known_format_are_refused() -> None:
    with pytest.raises(InputError, match="tools: got 1 of them; expected none: it is not known how") as caught:
        reading_of(serving(tiny_tokenizer.CHAT_TEMPLATE), body(tools=[TOOL]), [5])
    assert "--tool-call-parser" in caught.value.remedy


def test_special_tokens_that_the_parser_needs_are_shown() -> None:
    special = serving(tiny_tokenizer.CHAT_TEMPLATE).tokenizer.special_ids_in(["<|user|>analysis</s>"])
    assert special == {3, 2}
