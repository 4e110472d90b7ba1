"""What the text of an answer has to be, as a body says it in any of several fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eightfold.errors import InputError
from eightfold.grammar.compiler import check_grammar
from eightfold.server.protocol import GenerationBody, decode_json
from eightfold.types import Grammar

_PATHS: Mapping[str, str] = {"response_format": "response_format.json_schema.schema"}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def grammar_of(body: GenerationBody, *, begin_after: str = "") -> Grammar | None:
    """The grammar that a body asks for; None where any text will do.

    Args:
        body: what was asked.
        begin_after: text after which the grammar begins; empty where it begins at once.

    Raises:
        InputError: more than one of the fields says something, one is malformed, or says what cannot be enforced. `what` is the
            field's path.
    """
    found = {
        "response_format": _of_format(body.response_format, begin_after),
        "guided_json": None if body.guided_json is None else _of_schema(body.guided_json, begin_after),
        "guided_regex": None if body.guided_regex is None else Grammar.regex(body.guided_regex, begin_after=begin_after),
    }
    asked = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(asked) > 1:
        first, second, *_ = asked
        raise InputError(second, got=f"one beside {first}", expected="one of the two")
    for name, grammar in asked.items():
        check_grammar(grammar, _PATHS.get(name, name) if grammar.kind == "json_schema" else name)
        return grammar
    return None


def _of_format(given: Mapping[str, Any] | None, begin_after: str) -> Grammar | None:
    if given is None:
        return None
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_schema(_ANY_OBJECT, begin_after=begin_after)
        case "json_schema":
            described = given.get("json_schema")
            schema = described.get("schema") if isinstance(described, Mapping) else None
            if not isinstance(schema, Mapping | bool):
                got = "nothing" if schema is None else repr(schema)
                raise InputError("response_format.json_schema.schema", got=got, expected="a JSON schema")
            return Grammar.json_schema(schema, begin_after=begin_after)
    raise InputError("response_format.type", got=repr(given.get("type")), expected='"text", "json_object" or "json_schema"')


def _of_schema(given: Mapping[str, Any] | str, begin_after: str) -> Grammar:
    schema: object = given
    if isinstance(given, str):
        try:
            schema = decode_json(given.encode("utf-8", "surrogatepass"))
        except InputError as error:
            raise InputError("guided_json", got=error.got, expected="a JSON schema") from error
    if not isinstance(schema, Mapping | bool):
        raise InputError("guided_json", got=repr(schema), expected="a JSON schema")
    return Grammar.json_schema(schema, begin_after=begin_after)
