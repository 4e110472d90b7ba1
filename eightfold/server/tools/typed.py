"""Values that a model writes as plain text, as the JSON that a function's schema says they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
# What Python's own str() makes of them, which models have seen a lot of.
_PYTHON_WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_MOST_REFERENCES = 16


def json_text(value: str) -> str:
    """A text as JSON, with its characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a function's schema allows for one of its parameters; none where it does not say."""
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(own, schema, _MOST_REFERENCES))


def _types(part: object, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(part, Mapping) or depth == 0:
        return set()
    if isinstance(part.get("$ref"), str):
        return _types(_referred(root, part["$ref"]), root, depth - 1)
    named = part.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, Sequence):
        return {str(item) for item in named}
    values = part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    found = {_JSON_TYPES.get(type(value), "string") for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        branches = part.get(name)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch, root, depth - 1)
    return found


def _referred(root: Mapping[str, Any], reference: str) -> object:
    """The part of a schema that a local reference such as `#/$defs/a` names."""
    part: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        if not isinstance(part, Mapping) or step not in part:
            return None
        part = part[step]
    return part


class TypedValue:
    """One value that comes in pieces. A text is told as it comes, anything else when it is whole.

    Args:
        types: JSON types that the value may have; without any it is a text.
        say: takes the JSON, in pieces.
    """

    def __init__(self, types: frozenset[str], say: Callable[[str], None]) -> None:
        self._types = types
        self._say = say
        self._is_text = types <= {"string"}
        self._parts: list[str] = []
        self._begun = False
        self._line_break = ""  # at the end; the last one is not part of the value

    def push(self, text: str) -> None:
        """The next piece of the value."""
        if not self._is_text:
            self._parts.append(text)
            return
        if not self._begun:
            self._begun = True
            self._say('"')
            text = text.removeprefix("\n")
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        self._say(json_text(text.removesuffix("\n"))[1:-1])

    def finish(self) -> None:
        """The value is whole."""
        if not self._is_text:
            self._say(self._converted("".join(self._parts)))
        else:
            self._say('"' if self._begun else '""')

    def _converted(self, text: str) -> str:
        stripped = text.strip()
        stripped = _PYTHON_WORDS.get(stripped, stripped)
        try:
            kind = _JSON_TYPES[type(json.loads(stripped))]
        except (ValueError, RecursionError):
            return json_text(text.removeprefix("\n").removesuffix("\n"))
        fits = kind in self._types or (kind == "integer" and "number" in self._types) or "string" not in self._types
        return stripped if fits else json_text(text.removeprefix("\n").removesuffix("\n"))
