from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eightfold.errors import InputError
from eightfold.server.reasoning import REASONING, AnswerParser, reasoning_for, reasoning_format
from eightfold.server.tools.deltas import ContentText, Parsed, ReasoningText, gather
from tests.server.tools.recorded import CASES, PARIS, TOOLS, harmony, xml

CALL = f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
# Reasoning format, format of calls, end of the prompt, answer; reasoning, content, number of calls.
ANSWERS: list[tuple[str | None, str | None, str, str, str, str, int]] = [
    ("qwen3", None, "", "<think>\nLet me see.\n</think>\n\nFour.", "Let me see.", "Four.", 0),
    ("qwen3", None, "", "\n<think>a  b\n\nc</think>d\n", "a  b\n\nc", "d\n", 0),
    ("qwen3", None, "", "No thoughts. <think> is a tag.", "", "No thoughts. <think> is a tag.", 0),
    ("qwen3", None, "", "  spaced", "", "  spaced", 0),
    ("qwen3", None, "", "<think>\n\n</think>\n\nDirect.", "", "Direct.", 0),
    ("qwen3", None, "", "<think>cut off </thin", "cut off </thin", "", 0),
    ("qwen3", None, "", "<thinking>hm</thinking>", "", "<thinking>hm</thinking>", 0),
    ("qwen3", None, "<think>\n\n</think>\n\n", "Answer with </think> in it.", "", "Answer with </think> in it.", 0),
    ("qwen3", None, "<|im_start|>assistant\n<think>\n", "if a < b\n</think>\n\nYes.", "if a < b", "Yes.", 0),
    ("nemotron_3", None, "<think>\n", "<think>again</think>", "again", "", 0),
    ("nemotron_3", "qwen3_coder", "<think>\n", "Need it.\n</think>\n\n" + xml("get_weather", city="Paris"), "Need it.", "", 1),
    ("nemotron_3", "qwen3_coder", "<think></think>", xml("now") + "ok", "", "ok", 1),
    ("deepseek-r1", None, "", "First.\n</think>\n\nSecond. </think>", "First.", "Second. </think>", 0),
    ("deepseek-r1", None, "<|Assistant|>", "<think>\nFirst.\n</think>Second.", "First.", "Second.", 0),
    ("deepseek-r1", None, "", "never ends ", "never ends", "", 0),
    ("deepseek-r1", None, "</think>\n\n", "plain", "", "plain", 0),
    ("qwen3", "hermes", "", f"<think>\nUse {CALL}?\n</think>\n\nOk.\n{CALL}", f"Use {CALL}?", "Ok.", 1),
    (None, "hermes", "", f"<think>x</think>{CALL}", "", "<think>x</think>", 1),
    ("gpt-oss", "gpt-oss", "", harmony("analysis", "a") + "<|start|>assistant" + harmony("final", "b", ""), "a", "b", 0),
    ("gpt-oss", None, "", harmony("analysis", "a") + "<|start|>assistant" + harmony("final", "b", ""), "a", "b", 0),
    (None, None, "", "<think>all</think> is content ", "", "<think>all</think> is content ", 0),
]


def parse(reasoning: str | None, tools: str | None, prompt: str, pieces: Sequence[str]) -> Parsed:
    numbers = count()
    parser = AnswerParser(reasoning, tools, TOOLS, prompt=prompt, make_id=lambda: f"call {next(numbers)}")
    return gather([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_split_alike_however_it_is_cut(case: tuple[str | None, str | None, str, str, str, str, int]) -> None:
    reasoning, tools, prompt, text, thought, content, num_calls = case
    whole = parse(reasoning, tools, prompt, [text])
    assert (whole.reasoning, whole.content, len(whole.calls)) == (thought, content, num_calls)
    for place in range(len(text) + 1):
        assert parse(reasoning, tools, prompt, [text[:place], text[place:]]) == whole, place
    assert parse(reasoning, tools, prompt, list(text)) == whole


@settings(max_examples=300)
@given(
    st.sampled_from(["qwen3", "deepseek-r1", None]),
    st.sampled_from([*CASES]),
    st.lists(st.sampled_from(["<think>", "</think>", " ", "\n", "x", "<", "</"]), max_size=8).map("".join),
    st.lists(st.integers(0, 1000), min_size=2, max_size=4),
)
def test_reasoning_before_recorded_answers(
    reasoning: str | None, case: tuple[str, object], lead: str, places: list[int]
) -> None:
    name, answer = case
    text = lead + answer.text  # type: ignore[attr-defined]
    ends = sorted(place % (len(text) + 1) for place in places)
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert parse(reasoning, name, "", pieces) == parse(reasoning, name, "", [text])


def test_reasoning_and_content_stream() -> None:
    parser = AnswerParser("qwen3", "hermes", TOOLS)
    assert parser.push("<thi") == []
    assert parser.push("nk>Let me") == [ReasoningText("Let me")]
    assert parser.push(" see. </th") == [ReasoningText(" see.")]
    assert parser.push("ink>\n\nSo") == [ContentText("So")]
    assert parser.finish() == []


def test_the_markers_are_those_that_must_show_in_the_text() -> None:
    assert AnswerParser().markers == ()
    assert AnswerParser("qwen3", "mistral").markers == ("<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert "<|channel|>" in AnswerParser("gpt-oss").markers


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' }} <tool_call><function=", "nemotron_3"),
        ("<|im_start|> </think>", "qwen3"),
        ("<|Assistant|><think>", "deepseek-r1"),
        ("<|channel|>analysis", "gpt-oss"),
        ("<|im_start|>", None),
    ],
)
def test_the_template_shows_the_format(template: str, name: str | None) -> None:
    assert reasoning_for(template) == name


def test_names() -> None:
    assert all(reasoning_format(name) is REASONING[name] for name in REASONING)
    with pytest.raises(
        InputError, match="reasoning_parser: got qwen4; expected one of deepseek-r1, qwen3, nemotron_3, gpt-oss"
    ):
        AnswerParser("qwen4")
    with pytest.raises(InputError, match="tool_call_parser: got xml"):
        AnswerParser(None, "xml")
