from __future__ import annotations

import pytest

from eightfold.server.tools.calls import CallParser
from eightfold.server.tools.deltas import CallArguments, CallStart, ContentText, Delta
from eightfold.server.tools.reader import Steps


class OneCall(CallParser):
    """Text, then "@" and one call in JSON, then text."""

    other_keys = frozenset({"id"})

    def _parse(self) -> Steps[None]:
        yield from self._reader.until(self._content, "@")
        outcome = yield from self._json_call("@")
        self._content(f"[{outcome}]")
        yield from self._reader.until(self._content)
        self._end_content()


def read(text: str) -> list[Delta]:
    parser = OneCall(make_id=lambda: "id")
    return parser.push(text) + parser.finish()


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ('@{"name": "f"}', "whole"),
        ('@ { "id" : 5 , "name" : "f" , "arguments" : { } }', "whole"),
        ('@{"name": "f", "arguments": {"a": }', "cut"),
        ('@{"name": "f", "arguments": {', "cut"),
        ('@{"name": "f"', "cut"),
        ('@{"arguments": {}}', "text"),
        ('@{"name": ""}', "text"),
        ('@{"name": "f", "other": 1}', "text"),
        ('@{"name": "\\x"}', "text"),
        ("@{name: f}", "text"),
        ('@{"name" "f"}', "text"),
        ("@", "cut"),
    ],
)
def test_what_becomes_of_a_call(text: str, outcome: str) -> None:
    deltas = read(text)
    told = "".join(delta.text for delta in deltas if isinstance(delta, ContentText))
    assert told.endswith(f"[{outcome}]") or f"[{outcome}]" in told
    begun = outcome != "text" and '"name": "f"' in text.replace(" :", ":") and text != '@{"name": "f"'
    assert any(isinstance(delta, CallStart) for delta in deltas) == begun
    if outcome == "text":
        assert told.startswith("@")


def test_whitespace_beside_a_call_belongs_to_nobody() -> None:
    deltas = read(' a  b \n@{"name": "f"}')
    assert deltas == [ContentText(" a  b"), CallStart(0, "id", "f"), CallArguments(0, "{}"), ContentText(" \n[whole]")]


def test_a_second_set_of_arguments_is_passed_over() -> None:
    deltas = read('@{"name": "f", "arguments": {"a": 1}, "id": 1, "arguments": {}}')
    assert CallArguments(0, "}") in deltas
    assert sum(isinstance(delta, CallStart) for delta in deltas) == 1
