from __future__ import annotations

import json
from typing import Any

import pytest

from eightfold.server.tools.typed import TypedValue, json_text, types_of


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None, True, 1.5]}, {"string", "integer", "null", "boolean", "number"}),
        ({"const": {}}, {"object"}),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/A"}]}, {"array", "boolean"}),
        ({"oneOf": [{"type": "string"}], "allOf": [{"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({}, set()),
        (True, set()),
    ],
)
def test_types_come_from_the_schema(schema: Any, types: set[str]) -> None:
    root = {"properties": {"a": schema}, "$defs": {"A": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of(root, "a") == types
    assert types_of(root, "b") == frozenset()
    assert types_of({"properties": []}, "a") == frozenset()


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [
        ({"string"}, "\nhello\n", "hello"),
        ({"string"}, "5", "5"),
        (set(), "\n\ntwo\n\n", "\ntwo\n"),
        ({"string"}, "", ""),
        ({"integer"}, "\n5\n", 5),
        ({"number"}, "5", 5),
        ({"boolean"}, "False", False),
        ({"null"}, "None", None),
        ({"object"}, '{"a": [1]}', {"a": [1]}),
        ({"array"}, "[1, 2]", [1, 2]),
        ({"integer"}, "five", "five"),
        ({"integer"}, '"quoted"', "quoted"),
        ({"string", "null"}, "null", None),
        ({"string", "null"}, "7", "7"),
        ({"string", "integer"}, "7", 7),
        ({"object"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_a_value_becomes_what_its_types_say(types: set[str], text: str, value: object) -> None:
    parts: list[str] = []
    typed = TypedValue(frozenset(types), parts.append)
    for character in text[:100]:
        typed.push(character)
    typed.push(text[100:])
    typed.finish()
    assert json.loads("".join(parts)) == value


def test_a_text_keeps_its_characters() -> None:
    assert json_text('é "\n') == '"é \\"\\n"'
