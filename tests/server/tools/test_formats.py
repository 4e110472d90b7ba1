from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eightfold.server.tools.deltas import CallArguments, CallStart, ContentText, Parsed, ReasoningText, gather
from eightfold.server.tools.formats import PARSERS, FormatName
from tests.server.tools.recorded import CASES, RECORDED, TOOLS, Answer

MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "now",
    ">",
    "</function>",
    "<parameter=",
    "</parameter>",
    "<|python_tag|>",
]
MARKS += ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"]
MARKS += [
    '{"name": "now"',
    ', "arguments": ',
    ', "parameters": ',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    " ",
    "\n",
    ";",
    ",",
    ":",
    "é",
    "<",
]


def parse(name: FormatName, pieces: Sequence[str]) -> Parsed:
    numbers = count()
    parser = PARSERS[name](TOOLS, make_id=lambda: f"call {next(numbers)}")
    return gather([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_a_recorded_answer_means_what_it_means(name: FormatName, answer: Answer) -> None:
    parsed = parse(name, [answer.text])
    assert (parsed.content, parsed.reasoning) == (answer.content, answer.reasoning)
    assert [(call.name, call.arguments) for call in parsed.calls] == answer.calls


def test_there_are_enough_recorded_answers_of_each_format() -> None:
    assert RECORDED.keys() == PARSERS.keys()
    assert all(len(answers) >= 8 for answers in RECORDED.values())


@pytest.mark.parametrize(("name", "answer"), CASES)
def test_an_answer_cut_anywhere_means_the_same(name: FormatName, answer: Answer) -> None:
    whole = parse(name, [answer.text])
    for place in range(len(answer.text) + 1):
        assert parse(name, cut(answer.text, [place])) == whole, place
    assert parse(name, list(answer.text)) == whole


@settings(max_examples=300)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_an_answer_cut_in_several_places_means_the_same(case: tuple[FormatName, Answer], places: list[int]) -> None:
    name, answer = case
    assert parse(name, cut(answer.text, places)) == parse(name, [answer.text])


@settings(max_examples=600)
@given(
    st.sampled_from(list(PARSERS)),
    st.lists(st.sampled_from(MARKS), max_size=14).map("".join),
    st.lists(st.integers(0, 1000), max_size=4),
)
def test_any_text_is_read_to_its_end_and_alike_however_it_is_cut(name: FormatName, text: str, places: list[int]) -> None:
    whole = parse(name, [text])
    assert parse(name, cut(text, places)) == whole
    assert parse(name, list(text)) == whole
    if not whole.calls and name != "gpt-oss":
        rest = text.removeprefix(whole.content)  # empty, or a call that was cut off before it had a name
        assert rest != text or not whole.content
        assert not rest or rest.lstrip().startswith(("<function=", OPENINGS[name]))


@pytest.mark.parametrize("name", list(PARSERS))
def test_what_is_certain_is_told_at_once(name: FormatName) -> None:
    parser = PARSERS[name](TOOLS)
    assert parser.push("Some text") == [ContentText("Some text")]
    assert parser.push(" and") == [ContentText(" and")]


def test_arguments_stream_as_they_come() -> None:
    parser = PARSERS["hermes"](TOOLS, make_id=lambda: "id")
    assert parser.push('<tool_call>{"name": "now", "argu') == []
    assert parser.push('ments": {"a') == [
        CallStart(0, "id", "now"),
        CallArguments(0, "{"),
        CallArguments(0, '"'),
        CallArguments(0, "a"),
    ]
    assert gather([CallStart(0, "id", "now"), *parser.push('b": 1')]).calls[0].arguments == 'b": 1'


def test_texts_among_the_arguments_of_xml_stream_too() -> None:
    parser = PARSERS["qwen3_coder"](TOOLS, make_id=lambda: "id")
    parser.push("<tool_call><function=write_file><parameter=text>")
    assert parser.push("\nsome") == [CallArguments(0, '"'), CallArguments(0, "some")]
    assert parser.push(" more\n") == [CallArguments(0, " more")]
    assert "".join(delta.text for delta in parser.push("x</parameter>") if isinstance(delta, CallArguments)) == '\\nx"'


def test_reasoning_of_harmony_streams() -> None:
    parser = PARSERS["gpt-oss"](TOOLS)
    assert parser.push("<|channel|>analysis<|message|>Let me") == [ReasoningText("Let me")]


def test_mistral_gives_the_models_own_id_or_one_that_its_template_takes() -> None:
    parser = PARSERS["mistral"](TOOLS)
    deltas = parser.push("[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}[TOOL_CALLS]now[ARGS]{}") + parser.finish()
    first, second = (delta.call_id for delta in deltas if isinstance(delta, CallStart))
    assert first == "abcDEF123"
    assert len(second) == 9
    assert second.isalnum()


def test_a_long_answer_takes_time_in_proportion() -> None:
    parser = PARSERS["hermes"](TOOLS)
    deltas = parser.push('<tool_call>{"name": "now", "arguments": {"a": "')
    for _ in range(20_000):
        deltas += parser.push("some text { } < ")
    (call,) = gather(deltas).calls
    assert len(call.arguments) == len('{"a": "') + 20_000 * 16


CALLS: dict[FormatName, list[str]] = {
    "hermes": ['Hi <tool_call>\n{"name": "now", "arguments": {"a": "b"}}\n</tool_call>'],
    "qwen3_coder": ["Hi <tool_call>\n<function=now>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>"],
    "llama3": ['Hi <|python_tag|>{"name": "now", "parameters": {"a": "b"}}; {"name": "now", "parameters": {}}'],
    "mistral": [
        'Hi [TOOL_CALLS][{"name": "now", "arguments": {"a": "b"}}, {"name": "now", "arguments": {}}]',
        'Hi [TOOL_CALLS]now[CALL_ID]abc[ARGS]{"a": "b"}',
    ],
    "gpt-oss": [
        "<|channel|>final<|message|>Hi <|end|><|start|>assistant<|channel|>commentary to=functions.now "
        '<|constrain|>json<|message|>{"a": "b"}<|call|>'
    ],
}
OPENINGS: dict[FormatName, str] = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "gpt-oss": "<|channel|>commentary",
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in CALLS.items() for text in texts])
def test_a_call_that_is_cut_off_never_shows_as_content(name: FormatName, text: str) -> None:
    begun = text.index(OPENINGS[name]) + len(OPENINGS[name])
    whole = parse(name, [text])
    assert whole.content == "Hi" or name == "gpt-oss"
    for length in range(begun, len(text)):
        parsed = parse(name, [text[:length]])
        assert parsed.content.strip() == "Hi", text[:length]
        for call, full in zip(parsed.calls, whole.calls, strict=False):
            assert full.arguments.startswith(call.arguments), text[:length]
