"""What the text of an answer has to be, as a body says it in any of several fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eightfold.errors import InputError
from eightfold.grammar.compiler import check_grammar
from eightfold.server.fields import refuse_unknown, shown
from eightfold.server.protocol import GenerationBody, decode_json
from eightfold.types import Grammar

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPES = '"text", "json_object" or "json_schema"'
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_SCHEMA_PATH = "response_format.json_schema"


def grammar_of(body: GenerationBody) -> Grammar | None:
    """The grammar that a body asks for; None where any text will do.

    Compiling takes milliseconds, and up to a second for the largest schemas.

    Args:
        body: what was asked. A schema is enforced whether or not it says "strict".

    Raises:
        InputError: more than one of the fields says something, one is malformed, or says what cannot be enforced. `what` is the
            field's path.
    """
    found = {
        "response_format": _of_format(body.response_format),
        "guided_json": None if body.guided_json is None else _of_schema(body.guided_json),
        "guided_regex": None if body.guided_regex is None else Grammar.regex(body.guided_regex),
    }
    asked = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(asked) > 1:
        first, second, *_ = asked
        raise InputError(second, got=f"one beside {first}", expected="one of the two")
    for name, grammar in asked.items():
        is_schema = name == "response_format" and body.response_format != {"type": "json_object"}
        named = replace(grammar, name=f"{_SCHEMA_PATH}.schema" if is_schema else name)
        check_grammar(named)
        return named
    return None


def _of_format(given: Mapping[str, Any] | None) -> Grammar | None:
    if given is None:
        return None
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise InputError("response_format.type", got=shown(kind), expected=_TYPES)
    refuse_unknown(given, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar.json_schema(_ANY_OBJECT)
    described = given.get("json_schema")
    if not isinstance(described, Mapping):
        raise InputError(_SCHEMA_PATH, got=shown(described), expected='an object with a "name" and a "schema"')
    refuse_unknown(described, _SCHEMA_FIELDS, _SCHEMA_PATH)
    for name, kinds, expected in (
        ("name", str, "a text"),
        ("description", str, "a text"),
        ("strict", bool, "true or false"),
    ):
        value = described.get(name)
        if value is not None and not isinstance(value, kinds):
            raise InputError(f"{_SCHEMA_PATH}.{name}", got=shown(value), expected=expected)
    schema = described.get("schema")
    if not isinstance(schema, Mapping | bool):
        raise InputError(f"{_SCHEMA_PATH}.schema", got=shown(schema), expected="a JSON schema")
    return Grammar.json_schema(schema)


def _of_schema(given: Mapping[str, Any] | str) -> Grammar:
    schema: object = given
    if isinstance(given, str):
        try:
            schema = decode_json(given.encode("utf-8", "surrogatepass"))
        except InputError as error:
            raise InputError("guided_json", got=error.got, expected="a JSON schema") from error
    if not isinstance(schema, Mapping | bool):
        raise InputError("guided_json", got=shown(schema), expected="a JSON schema")
    return Grammar.json_schema(schema)
