from __future__ import annotations

from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.schema import answer_grammar
from eightfold.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "thing", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_schema({"type": "object"})),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, Grammar.json_schema(SCHEMA)),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}}, Grammar.json_schema(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": None, "description": "d"}}},
            Grammar.json_schema(SCHEMA),
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}}, Grammar.json_schema({})),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": '{"type": "integer"}'}, Grammar.json_schema({"type": "integer"})),
        ({"guided_regex": "a+", "begin_after": "</think>"}, Grammar.regex("a+", begin_after="</think>")),
        (
            {"response_format": {"type": "json_object"}, "begin_after": "</think>"},
            Grammar.json_schema({"type": "object"}, begin_after="</think>"),
        ),
    ],
)
def test_fields_become_a_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert answer_grammar(**fields) == grammar


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "what", "message"),
    [
        ({"response_format": {}}, "response_format.type", 'got nothing; expected "text", "json_object" or "json_schema"'),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type", "got 'structural_tag'"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "got a field that is unknown"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "got nothing; expected an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "got nothing; expected a JSON schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"name": 5}}},
            "response_format.json_schema.name",
            "got 5; expected a text",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": "yes"}}},
            "response_format.json_schema.strict",
            "got 'yes'; expected true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED | {"shema": {}}}},
            "response_format.json_schema.shema",
            "got a field that is unknown",
        ),
        (
            schema_of({"properties": {"a": {"not": {}}}}),
            "response_format.json_schema.schema.properties.a.not",
            "got a keyword that is not supported",
        ),
        (schema_of({"type": "integer", "minimum": 9, "maximum": 1}), "response_format.json_schema.schema", "Unsatisfiable"),
        (schema_of(False), "response_format.json_schema.schema", "got false"),
        ({"guided_json": "{"}, "guided_json", "got broken JSON"),
        ({"guided_json": "[]"}, "guided_json", r"got []; expected a JSON schema"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json.uniqueItems", "got a keyword that is not supported"),
        ({"guided_regex": "("}, "guided_regex", "got "),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "got a value beside guided_json; expected one of the two"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_path(fields: dict[str, Any], what: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        answer_grammar(**fields)
    assert caught.value.what == what
    assert message in str(caught.value)
