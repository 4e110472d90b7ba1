"""Grammars out of bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.server.protocol import CompletionBody
from eightfold.server.structure import grammar_of
from eightfold.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def body(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "a"} | fields)


def wrapped(**described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True} | described}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": wrapped(schema=SCHEMA)}, "json_schema", SCHEMA),
        ({"response_format": wrapped(schema={})}, "json_schema", {}),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "[a-z]+"}, "regex", None),
    ],
)
def test_every_field_makes_its_grammar(fields: dict[str, Any], kind: str, text: Any) -> None:
    asked = body(**fields)
    grammar = grammar_of(asked)
    assert grammar is not None
    assert (grammar.kind, grammar.begin_after) == (kind, "")
    assert grammar.name.split(".")[0] in fields
    assert grammar.text == "[a-z]+" if text is None else json.loads(grammar.text) == text
    assert asked.params(grammar).grammar == grammar


def test_most_bodies_want_none() -> None:
    assert grammar_of(body()) is None
    assert grammar_of(body(response_format={"type": "text"})) is None


@pytest.mark.parametrize(
    ("fields", "what", "words"),
    [
        ({"response_format": {}}, "response_format.type", 'got nothing; expected "text"'),
        ({"response_format": {"type": "xml"}}, "response_format.type", "got 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "got nothing; expected an object"),
        ({"response_format": wrapped()}, "response_format.json_schema.schema", "got nothing; expected a JSON schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "a field that is unknown"),
        ({"response_format": {"type": "text", "zz": 1}}, "response_format.zz", "a field that is unknown"),
        ({"response_format": wrapped(name=5, schema={})}, "response_format.json_schema.name", "got 5; expected a text"),
        ({"response_format": wrapped(strict="yes", schema={})}, "response_format.json_schema.strict", "expected true or false"),
        ({"response_format": wrapped(shema={})}, "response_format.json_schema.shema", "schema, the nearest known field"),
        (
            {"response_format": wrapped(schema={"type": "integer", "minimum": 9, "maximum": 1})},
            "response_format.json_schema.schema",
            "Unsatisfiable",
        ),
        ({"guided_json": "[]"}, "guided_json", "got []; expected a JSON schema"),
        ({"response_format": wrapped(schema=[1])}, "response_format.json_schema.schema", "got [1]"),
        ({"guided_json": "{"}, "guided_json", "broken JSON"),
        ({"guided_json": {"typ": "object"}}, "guided_json.typ", "expected type, the nearest one that is"),
        (
            {"response_format": wrapped(schema={"not": {}})},
            "response_format.json_schema.schema.not",
            "a keyword that is not supported",
        ),
        ({"guided_regex": "("}, "guided_regex", "expected one that can be enforced"),
        ({"guided_json": "3"}, "guided_json", "got 3; expected a JSON schema"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "got one beside guided_json"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "got one beside response_format"),
    ],
)
def test_malformed_ones_are_refused(fields: dict[str, Any], what: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        grammar_of(body(**fields))
    assert caught.value.what == what
    assert words in str(caught.value)


def test_a_grammar_is_told_to_the_engine() -> None:
    grammar = Grammar.regex("a+")
    assert body(guided_regex="a+").params(grammar).grammar is grammar
