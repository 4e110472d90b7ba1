from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eightfold.server.tools.reader import Broken, Parser, Reader, Steps

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


class ValueParser(Parser[str]):
    """One JSON value, then "|" and whatever follows."""

    def _parse(self) -> Steps[None]:
        try:
            yield from self._reader.json_value(self._tell)
        except Broken:
            self._tell("!")
        following = yield from self._reader.skip_space()
        self._tell(f"({following})")


def read(pieces: list[str]) -> str:
    parser = ValueParser()
    return "".join([event for piece in pieces for event in parser.push(piece)] + parser.finish())


@given(VALUES, st.booleans())
def test_a_json_value_is_read_to_its_end_and_no_further(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read([*text, " |"]) == text + "(|)"
    assert read([text + "|"]) == text + "(|)"


@pytest.mark.parametrize("text", ["{", "[1", '"a', '"a\\', "", ",", '{"a": <', "[}", '[{"a"]'])
def test_a_broken_value_is_told_as_far_as_it_goes(text: str) -> None:
    assert "!" in read([text])
    assert read(list(text)) == read([text])


def run(steps: Steps[object]) -> object:
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value
    return "waits"


def test_until_holds_back_what_may_become_a_marker() -> None:
    reader, said = Reader(), list[str]()
    reader.push("text <a")
    steps = reader.until(said.append, "<ab>", "<ac>")
    assert run(steps) == "waits"
    assert said == ["text "]
    reader.push("d <ac> rest")
    assert run(steps) == "<ac>"
    assert "".join(said) == "text <ad "
    assert run(reader.peek()) == " "


def test_a_marker_that_may_come_is_waited_for() -> None:
    reader = Reader()
    reader.push("<th")
    steps = reader.goes_on_with("<think>", "</think>")
    assert run(steps) == "waits"
    reader.push("ink>")
    assert run(steps) == "<think>"
    reader.push("<thing")
    assert run(reader.goes_on_with("<think>")) is None


def test_what_was_taken_can_be_had_again() -> None:
    reader = Reader()
    reader.push("  ab")
    reader.record()
    assert run(reader.skip_space("a")) == "b"
    assert reader.recorded() == "  a"
    assert reader.recorded() == ""


def test_nothing_comes_of_a_parser_that_is_done() -> None:
    parser = ValueParser()
    assert parser.push("1 |") == ["1", "(|)"]
    assert parser.push("more") == []
    assert parser.finish() == []
