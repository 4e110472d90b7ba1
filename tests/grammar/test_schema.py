from __future__ import annotations

from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.grammar.schema import ANNOTATIONS, ENFORCED, check_schema

# Keywords of the drafts, and of OpenAPI, that are not enforced.
UNSUPPORTED = [
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
    "propertyNames",
    "contains",
]
UNSUPPORTED += ["minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties", "additionalItems"]
UNSUPPORTED += ["$dynamicRef", "$dynamicAnchor", "$recursiveRef", "nullable", "xml", "divisibleBy", "x-guidance", "made up", ""]


@pytest.mark.parametrize("keyword", UNSUPPORTED)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda inner: inner, "s"),
        (lambda inner: {"properties": {"a": {"items": inner}}}, "s.properties.a.items"),
        (lambda inner: {"anyOf": [True, inner]}, "s.anyOf[1]"),
        (lambda inner: {"allOf": [{"oneOf": [inner]}]}, "s.allOf[0].oneOf[0]"),
        (lambda inner: {"prefixItems": [inner], "additionalProperties": inner}, "s.additionalProperties"),
        (lambda inner: {"$defs": {"x": inner}}, "s.$defs.x"),
        (lambda inner: {"patternProperties": {"^a": inner}, "definitions": {}}, "s.patternProperties.^a"),
    ],
)
def test_a_keyword_that_is_not_enforced_is_refused_with_its_path(keyword: str, wrap: Any, path: str) -> None:
    with pytest.raises(InputError) as caught:
        check_schema(wrap({keyword: {}}), "s")
    assert caught.value.what == f"{path}.{keyword}"
    assert "a keyword that is not supported" in str(caught.value)


def test_a_slip_of_the_pen_gets_the_nearest_keyword() -> None:
    with pytest.raises(InputError, match=r"s.minlength: got a keyword that is not supported; expected minLength, the nearest"):
        check_schema({"minlength": 3}, "s")


def test_what_only_looks_like_a_keyword_is_none() -> None:
    check_schema({"properties": {"not": {"const": {"if": 1}}, "x-guidance": {"enum": ["uniqueItems"]}}, "default": {"not": 1}})
    check_schema({"type": "object", "x-order": 1, "title": "T", "examples": [{"nullable": True}]})
    check_schema({})
    check_schema(True)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], r"s: got \[\]; expected a JSON schema"),
        ("text", "s: got 'text'"),
        ({"items": [{}]}, r"s.items: got a list; expected one schema. prefixItems has a schema for each place"),
        ({"properties": []}, r"s.properties: got \[\]; expected an object of schemas"),
        ({"anyOf": {}}, "s.anyOf: got {}; expected a list of schemas"),
        ({"properties": {"a": 5}}, "s.properties.a: got 5"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_schema(schema, "s")


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"items": schema}
    with pytest.raises(InputError, match="got a schema within 64 others; expected at most 64 levels"):
        check_schema(schema, "s")


def test_the_lists_do_not_overlap() -> None:
    assert not ENFORCED & ANNOTATIONS
    assert not (ENFORCED | ANNOTATIONS) & set(UNSUPPORTED)
