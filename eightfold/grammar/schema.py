"""Which JSON schemas can be enforced.

llguidance refuses most keywords that it does not implement, but not words that it does not know and not those within
definitions that nothing refers to, and it lets a schema switch its checks off (`x-guidance`). Here every keyword of a schema is
on one of the lists below, or is refused with its path.

What is enforced departs from the specification in this: properties come in the order in which the schema lists them, and names
under `additionalProperties` and `patternProperties` may repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from eightfold.errors import InputError

ENFORCED = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "oneOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
    }
)
"""Keywords whose meaning every answer keeps. Where llguidance cannot enforce a value of one, it refuses the schema."""

ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that restrict nothing: they name, describe, or hold what others refer to."""

_IN_ONE = ("items", "additionalProperties")
_IN_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_IN_MAP = ("properties", "patternProperties", "$defs", "definitions")
_MOST_LEVELS = 64
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


def check_schema(schema: object, path: str = "json_schema") -> None:
    """Refuse a schema with a keyword that would not be enforced.

    Args:
        schema: the schema, decoded.
        path: how errors name it.

    Raises:
        InputError: `what` is the path of the keyword, or of what is no schema.
    """
    _check(schema, path, _MOST_LEVELS)


def check_shape(schema: object, path: str = "json_schema", *, levels: int = _MOST_LEVELS) -> None:
    """Refuse what is no JSON schema at all. Keywords that would not be enforced pass, and so do those that nobody knows.

    Args:
        schema: the schema, decoded.
        path: how errors name it.
        levels: of schemas within schemas that are left.

    Raises:
        InputError: `what` is the path of what is no schema, or of a type that there is not.
    """
    _check_level(schema, path, levels)
    if not isinstance(schema, Mapping):
        return
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise InputError(f"{path}.type", got=_shown(kind), expected=f"one of {', '.join(_TYPES)}, or a list of these")
    for part, part_path in _subschemas(schema, path):
        if not (isinstance(part, list) and part_path.endswith(".items")):  # older drafts have a list there
            check_shape(part, part_path, levels=levels - 1)


def _check_level(schema: object, path: str, levels: int) -> None:
    if not isinstance(schema, Mapping | bool):
        raise InputError(path, got=_shown(schema), expected="a JSON schema: an object, true or false")
    if levels == 0:
        raise InputError(
            path, got=f"a schema within {_MOST_LEVELS} others", expected=f"at most {_MOST_LEVELS} levels of schemas"
        )


def _check(schema: object, path: str, levels: int) -> None:
    _check_level(schema, path, levels)
    if not isinstance(schema, Mapping):
        return
    for keyword in schema:
        if keyword not in ENFORCED and keyword not in ANNOTATIONS and not _is_extension(keyword):
            raise _unsupported(keyword, path)
    if isinstance(schema.get("items"), list):
        raise InputError(
            f"{path}.items", got="a list", expected="one schema", remedy="prefixItems has a schema for each place."
        )
    for inner, inner_path in _subschemas(schema, path):
        _check(inner, inner_path, levels - 1)


def _is_extension(keyword: object) -> bool:
    """Whether a keyword is somebody's own note. llguidance reads its own, and would take orders from it."""
    return isinstance(keyword, str) and keyword.startswith("x-") and keyword != "x-guidance"


def _unsupported(keyword: object, path: str) -> InputError:
    near = get_close_matches(str(keyword), sorted(ENFORCED), n=1, cutoff=0.8)
    return InputError(
        f"{path}.{keyword}",
        got="a keyword that is not supported",
        expected=f"{near[0]}, the nearest one that is" if near else f"one of {', '.join(sorted(ENFORCED))}",
    )


def _subschemas(schema: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:
    for keyword in _IN_ONE:
        if keyword in schema:
            yield schema[keyword], f"{path}.{keyword}"
    for keyword in _IN_LIST:
        if keyword in schema:
            items = schema[keyword]
            if not isinstance(items, list):
                raise InputError(f"{path}.{keyword}", got=_shown(items), expected="a list of schemas")
            yield from ((item, f"{path}.{keyword}[{index}]") for index, item in enumerate(items))
    for keyword in _IN_MAP:
        if keyword in schema:
            named = schema[keyword]
            if not isinstance(named, Mapping):
                raise InputError(f"{path}.{keyword}", got=_shown(named), expected="an object of schemas")
            yield from ((item, f"{path}.{keyword}.{name}") for name, item in named.items())


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
