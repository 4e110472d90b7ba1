from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.grammar.compiler import GrammarCompiler, check_grammar
from eightfold.server.tools.choice import tool_grammar
from eightfold.server.tools.deltas import Parsed, gather
from eightfold.server.tools.formats import PARSERS, FormatName
from tests.grammar.masks import accepts, random_walk
from tests.tiny_tokenizer import EOS_ID, make

TOKENIZER = make()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.size, [EOS_ID])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/Unit"},
        "exact": {"type": "boolean"},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
    },
    "required": ["days", "mode"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["c", "f", None]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def read(name: FormatName, text: str) -> Parsed:
    parser = PARSERS[name](TOOLS)
    return gather(parser.push(text) + parser.finish())


def check_calls(parsed: Parsed) -> None:
    assert parsed.calls
    assert parsed.content == ""
    for call in parsed.calls:
        arguments = json.loads(call.arguments)
        assert call.name in ("get_weather", "now")
        if call.name == "now":
            assert arguments == {}
        else:
            assert {"days", "mode"} <= arguments.keys() <= {"days", "mode", "unit", "exact"}
            assert 1 <= arguments["days"] <= 9
            assert arguments["mode"] in ("fast", "slow")
            assert arguments.get("unit") in ("c", "f", None)
            assert isinstance(arguments.get("exact", True), bool)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "qwen3_coder"])
def test_even_a_random_model_calls_a_function(name: FormatName, choice: Any, seed: int) -> None:
    grammar = tool_grammar(TOOLS, choice, name)
    assert grammar is not None
    check_grammar(grammar)
    parsed = read(name, TOKENIZER.decode(random_walk(COMPILER.compile(grammar), {EOS_ID}, seed)))
    check_calls(parsed)
    if choice is NAMED:
        assert [call.name for call in parsed.calls] == ["get_weather"]


TEXTS: list[tuple[FormatName, str, str]] = [
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "\n"),
    ("llama3", '{"name": "now", "parameters": {}}', ""),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', ""),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "\n"),
    ("gpt-oss", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}", ""),
]


@pytest.mark.parametrize(("name", "text", "between"), TEXTS)
def test_calls_are_forced_in_the_words_of_the_format(name: FormatName, text: str, between: str) -> None:
    grammar = tool_grammar(TOOLS, "required", name)
    single = tool_grammar(TOOLS, "required", name, parallel=False)
    assert grammar is not None
    assert single is not None
    assert accepts(COMPILER.compile(grammar), encode(text), EOS_ID)
    assert accepts(COMPILER.compile(single), encode(text), EOS_ID)
    check_calls(read(name, text))
    assert not accepts(COMPILER.compile(grammar), encode("No call."), EOS_ID)
    named = tool_grammar(TOOLS, NAMED, name)
    assert named is not None
    assert not accepts(COMPILER.compile(named), encode(text), EOS_ID)
    if between:
        assert accepts(COMPILER.compile(grammar), encode(text + between + text), EOS_ID)
        assert not accepts(COMPILER.compile(single), encode(text + between + text), EOS_ID)


def test_harmony_may_think_before_it_calls() -> None:
    grammar = tool_grammar(TOOLS, "required", "gpt-oss")
    assert grammar is not None
    assert grammar.begin_after == ""
    text = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    text += "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert accepts(COMPILER.compile(grammar), encode(text), EOS_ID)


def test_texts_are_free_in_xml_and_end_where_their_tag_comes() -> None:
    tools = [{"type": "function", "function": {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}}}}]
    grammar = tool_grammar(tools, "required", "qwen3_coder")
    assert grammar is not None
    text = '<tool_call>\n<function=write>\n<parameter=text>\nif a < b:\n\n  "é"</x>\n</parameter>\n</function>\n</tool_call>'
    assert accepts(COMPILER.compile(grammar), encode(text), EOS_ID)
    assert accepts(COMPILER.compile(grammar), encode("<tool_call>\n<function=write>\n</function>\n</tool_call>"), EOS_ID)


def test_special_tokens_are_named_by_id() -> None:
    special = {"[TOOL_CALLS]": 3, "[ARGS]": 4}
    grammar = tool_grammar(TOOLS, "required", "mistral", special_ids=special)
    assert grammar is not None
    assert accepts(
        COMPILER.compile(grammar), [3, *encode("now"), 4, *encode("{}"), 3, *encode("now"), 4, *encode("{}")], EOS_ID
    )
    assert not accepts(COMPILER.compile(grammar), encode("[TOOL_CALLS]now[ARGS]{}"), EOS_ID)


def test_it_begins_after_the_reasoning() -> None:
    grammar = tool_grammar(TOOLS, "required", "hermes")
    assert grammar is not None
    grammar = replace(grammar, begin_after="</think>")
    text = "Call now.</think>\n\n" + TEXTS[0][1]
    assert accepts(COMPILER.compile(grammar), encode(text), EOS_ID)


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_free_choice_needs_no_grammar(choice: str | None) -> None:
    assert tool_grammar(TOOLS, choice, "hermes") is None
    assert tool_grammar([], choice, "hermes") is None


@pytest.mark.parametrize(
    ("tools", "choice", "what", "message"),
    [
        ([], "required", "tool_choice", "got 'required'; expected tools beside it"),
        (TOOLS, "always", "tool_choice", "got 'always'; expected \"auto\""),
        (TOOLS, {"type": "function"}, "tool_choice", 'expected "auto"'),
        (TOOLS, {"type": "custom", "function": {"name": "now"}}, "tool_choice", 'expected "auto"'),
        (
            TOOLS,
            {"type": "function", "function": {"name": "later"}},
            "tool_choice.function.name",
            "got 'later'; expected one of the tools: get_weather, now",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}],
            "required",
            "tools[0].function.parameters.properties.a.uniqueItems",
            "got a keyword that is not supported",
        ),
    ],
)
def test_what_cannot_be_demanded_is_refused(tools: Any, choice: Any, what: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        tool_grammar(tools, choice, "hermes")
    assert caught.value.what == what
    assert message in str(caught.value)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_schema_that_cannot_be_enforced_is_named(choice: Any) -> None:
    bad = {
        "type": "function",
        "function": {"name": "g", "parameters": {"type": "object", "properties": {"a": {"format": "x", "type": "string"}}}},
    }
    with pytest.raises(
        InputError, match=r"tools\[2\]\.function\.parameters: got Unknown format: x; expected one that can be enf"
    ):
        tool_grammar([*TOOLS[:3], bad], choice, "hermes")


def test_a_choice_has_no_unknown_fields() -> None:
    for choice, what in (
        ({"type": "function", "function": {"name": "now"}, "zz": 1}, "tool_choice.zz"),
        ({"type": "function", "function": {"name": "now", "zz": 1}}, "tool_choice.function.zz"),
    ):
        with pytest.raises(InputError) as caught:
            tool_grammar(TOOLS, choice, "hermes")
        assert caught.value.what == what
