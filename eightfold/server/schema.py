"""Structured output: from the fields of a request to the grammar of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eightfold.errors import InputError
from eightfold.grammar.compiler import check_grammar
from eightfold.types import Grammar

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_TYPES = '"text", "json_object" or "json_schema"'
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def answer_grammar(
    response_format: Mapping[str, Any] | None = None,
    guided_json: Mapping[str, Any] | str | None = None,
    guided_regex: str | None = None,
    *,
    begin_after: str = "",
) -> Grammar | None:
    """The grammar that a request asks its answer to follow, checked; None where it asks for none.

    Compiling takes milliseconds, and up to a second for the largest schemas.

    Args:
        response_format: OpenAI's field. A schema is enforced whether or not it says "strict".
        guided_json: vLLM's field: a schema, as an object or as text.
        guided_regex: vLLM's field: a regular expression for the whole answer.
        begin_after: text that ends the reasoning, where there will be some.

    Raises:
        InputError: a field of another shape, two of them at once, a schema or an expression that cannot be enforced. `what` is
            the field's path.
    """
    given = {"response_format": response_format, "guided_json": guided_json, "guided_regex": guided_regex}
    names = [name for name, value in given.items() if value is not None and value != {"type": "text"}]
    if len(names) > 1:
        raise InputError(names[1], got=f"a value beside {names[0]}", expected="one of the two")
    if not names:
        return None
    what, grammar = names[0], None
    if guided_regex is not None:
        grammar = Grammar.regex(guided_regex, begin_after=begin_after)
    elif guided_json is not None:
        schema = guided_json if isinstance(guided_json, Mapping) else _decoded(guided_json)
        grammar = Grammar.json_schema(schema, begin_after=begin_after)
    elif response_format is not None:
        what, schema = _format_schema(response_format)
        grammar = Grammar.json_schema(schema, begin_after=begin_after)
    if grammar is not None:
        check_grammar(grammar, what)
    return grammar


def _format_schema(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | bool]:
    """The path and the schema of a `response_format`."""
    kind = given.get("type")
    path = "response_format"
    if kind not in ("text", "json_object", "json_schema"):
        raise InputError(f"{path}.type", got=_shown(kind), expected=_TYPES)
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _refuse_others(given, known, path)
    if kind == "json_object":
        return path, _ANY_OBJECT
    path = f"{path}.json_schema"
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping):
        raise InputError(path, got=_shown(inner), expected='an object with a "name" and a "schema"')
    _refuse_others(inner, _SCHEMA_FIELDS, path)
    if not isinstance(inner.get("name", ""), str):
        raise InputError(f"{path}.name", got=_shown(inner["name"]), expected="a text")
    if not isinstance(inner.get("strict"), bool | None):
        raise InputError(f"{path}.strict", got=_shown(inner["strict"]), expected="true or false")
    schema = inner.get("schema")
    if not isinstance(schema, Mapping | bool):
        raise InputError(f"{path}.schema", got=_shown(schema), expected="a JSON schema")
    return f"{path}.schema", schema


def _refuse_others(given: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            raise InputError(f"{path}.{name}", got="a field that is unknown", expected=f"one of {', '.join(known)}")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("guided_json", got=f"broken JSON ({error})", expected="a JSON schema") from error


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
