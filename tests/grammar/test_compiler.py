from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eightfold.errors import InputError
from eightfold.grammar.compiler import GrammarCompiler, check_grammar
from eightfold.grammar.schema import ENFORCED
from eightfold.text import Tokenizer
from eightfold.types import Grammar
from tests.grammar.masks import accepts, permitted, random_walk
from tests.tiny_tokenizer import EOS_ID, byte_fallback, make

TOKENIZER = make()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.size, [EOS_ID])
DEFS = {"a": {"type": "integer"}}


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def takes(grammar: Grammar, text: str) -> bool:
    return accepts(COMPILER.compile(grammar), encode(text), EOS_ID)


# For each keyword that is enforced: a schema, what is valid under it, what is not.
ENFORCEMENT: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "$ref": ({"$defs": DEFS, "$ref": "#/$defs/a"}, ["5"], ['"5"', "5.5"]),
    "additionalProperties": (
        {"type": "object", "additionalProperties": {"type": "null"}},
        ['{"a":null}', "{}"],
        ['{"a":1}', "1"],
    ),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3"], ["2", '"3"']),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["3", "null"], ["true", '"3"']),
    "const": ({"const": {"a": [1]}}, ['{"a":[1]}'], ['{"a":[2]}', "1"]),
    "enum": ({"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2"]),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 5}, ["4"], ["5"]),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 5}, ["6"], ["5"]),
    "format": ({"type": "string", "format": "date"}, ['"2026-01-31"'], ['"2026-13-31"', '"x"']),
    "items": ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true,false]"], ["[1]", "true"]),
    "maxItems": ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
    "maxLength": ({"type": "string", "maxLength": 2}, ['"ab"', '"é€"'], ['"abc"']),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    "maximum": ({"type": "number", "maximum": 1.5}, ["1.5", "-7"], ["1.6", "2"]),
    "minItems": ({"type": "array", "minItems": 1}, ["[1]"], ["[]"]),
    "minLength": ({"type": "string", "minLength": 2}, ['"ab"'], ['"a"']),
    "minProperties": ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    "minimum": ({"type": "integer", "minimum": 10}, ["10", "99"], ["9"]),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, ["9", "12"], ["10"]),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
    "pattern": ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"ab"', '""']),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
        ['{"n1":1}'],
        ['{"n1":"x"}', '{"m":1}'],
    ),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]"], ['["a"]', "[1,2]"]),
    "properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        ['{"a":1}', "{}", '{ "a" : 1 }'],
        ['{"a":"1"}', '{"b":1}'],
    ),
    "required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
        ['{"b":1}', '{"a":1,"b":2}'],
        ['{"a":1}'],
    ),
    "type": ({"type": ["integer", "null"]}, ["1", "null"], ["1.5", "true", '"x"', "[]"]),
}


@pytest.mark.parametrize("keyword", sorted(ENFORCED))
def test_every_keyword_that_is_said_to_be_enforced_is(keyword: str) -> None:
    schema, valid, invalid = ENFORCEMENT[keyword]
    grammar = Grammar.json_schema(schema)
    check_grammar(grammar)
    assert [text for text in valid if not takes(grammar, text)] == []
    assert [text for text in invalid if takes(grammar, text)] == []


@pytest.mark.parametrize("schema", [{}, True])
def test_a_schema_that_says_nothing_is_any_json(schema: Any) -> None:
    grammar = Grammar.json_schema(schema)
    assert all(takes(grammar, text) for text in ("null", "-1.5e3", '"a\\n\\"é"', '{"a":[{},[]],"b":true}', "[ 1 , 2 ]"))
    assert not any(takes(grammar, text) for text in ("nul", "{a:1}", "[1,]", "", "1 2", "'a'"))


def test_expressions_and_lark() -> None:
    assert takes(Grammar.regex("(hello|world)+[0-9]{2}"), "helloworld42")
    assert not takes(Grammar.regex("[0-9]{2}"), "123")
    assert takes(Grammar("lark", 'start: "a" (" b")* %json {"type": "integer"}'), "a b b5")


@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_under_a_schema_is_valid_by_it(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"type": "integer", "minimum": -5, "maximum": 500},
            "tags": {"type": "array", "items": {"enum": ["a", "b c", "é"]}, "minItems": 1, "maxItems": 2},
            "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "required": ["name", "size", "tags"],
        "additionalProperties": False,
    }
    walked = random_walk(COMPILER.compile(Grammar.json_schema(schema)), {EOS_ID}, seed)
    value = json.loads(TOKENIZER.decode(walked))
    assert {"name", "size", "tags"} <= value.keys() <= schema["properties"].keys()  # type: ignore[attr-defined]
    assert len(value["name"]) <= 8
    assert isinstance(value["size"], int)
    assert -5 <= value["size"] <= 500
    assert set(value["tags"]) <= {"a", "b c", "é"}
    assert 1 <= len(value["tags"]) <= 2
    assert value.get("more") in (None, True, False)


def test_whitespace_between_parts_is_bounded() -> None:
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "null"}})
    assert takes(grammar, "[" + " " * 32 + "]")
    assert not takes(grammar, "[" + " " * 33 + "]")


def test_the_mask_follows_the_tokens_however_they_come() -> None:
    grammar = Grammar.regex("hello[0-9]+ w")
    text = encode("hello123")
    steps, leap = COMPILER.compile(grammar), COMPILER.compile(grammar)
    masks = [steps.mask(text[:length]) for length in range(len(text) + 1)]
    assert leap.mask(text) == masks[-1]
    assert leap.mask(text) == masks[-1]
    assert masks[0] != masks[-1]


def test_constraints_of_one_grammar_do_not_share_their_state() -> None:
    grammar = Grammar.json_schema({"enum": ["one", "two"]})
    first, second = COMPILER.compile(grammar), COMPILER.compile(grammar)
    assert permitted(second.mask([])) != permitted(first.mask(encode('"o')))
    assert accepts(second, encode('"two"'), EOS_ID)


def test_ids_that_the_tokenizer_does_not_know_are_never_permitted() -> None:
    wide = GrammarCompiler(TOKENIZER, TOKENIZER.size + 77, [EOS_ID])
    for grammar in (Grammar.json_schema({}), Grammar.regex("(?s:.*)"), Grammar.regex("x", begin_after="</think>")):
        mask = wide.compile(grammar).mask([])
        assert mask is not None
        assert len(mask) * 8 >= TOKENIZER.size + 77
        assert max(permitted(mask)) < TOKENIZER.size


def test_an_end_token_comes_where_the_grammar_is_done_and_then_alone() -> None:
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.size, [EOS_ID, 0])
    constraint = compiler.compile(Grammar.regex("ab?"))
    assert not {EOS_ID, 0} & set(permitted(constraint.mask([])))
    assert {EOS_ID, 0} < set(permitted(constraint.mask(encode("a"))))
    assert set(permitted(constraint.mask(encode("ab")))) == {EOS_ID, 0}


@pytest.mark.parametrize("grammar", [Grammar.regex(r"[^\s\S]"), Grammar.json_schema({"$ref": "#"})])
def test_what_no_answer_fits_is_refused_by_the_name_of_its_field(grammar: Grammar) -> None:
    named = replace(grammar, name="guided")
    check_grammar(named)  # without the model's tokens nothing is wrong with it
    with pytest.raises(InputError, match="guided: got a grammar that comes to where no token leads on; expected one that some"):
        COMPILER.compile(named)


def test_a_limit_of_the_library_is_told() -> None:
    constraint, token_ids = COMPILER.compile(Grammar.regex("((a{1,100}){1,100}){1,100}")), encode("a" * 300)
    for length in range(300):
        assert constraint.failure == ""
        if not permitted(constraint.mask(token_ids[:length])):
            break
    assert "runs into the limit of work on its regular expressions (" in constraint.failure
    assert "too many expressions" in constraint.failure
    assert "aaa" not in constraint.failure  # the log has no text of answers


def may_think(grammar: Grammar) -> Grammar:
    return replace(grammar, begin_after="</think>", opened_by="<think>")


def test_an_answer_is_held_to_its_grammar_unless_it_thinks() -> None:
    grammar = may_think(Grammar.regex("[0-9]+"))
    for text in ("42", "<think>Hm, hello.</think>42", "\n\n42", "\n<think>\n</think>\n\n42", "<think></think>7"):
        assert takes(grammar, text), text
    for text in ("", "x42", "<x", "<think>", "<think>42", "<thin42", "</think>42", "\n\n\n42", "<think></think>x", "4<think>"):
        assert not takes(grammar, text), text
    first = permitted(COMPILER.compile(grammar).mask([]))
    assert set(first) == {*(encode(digit)[0] for digit in "0123456789"), encode("<")[0], *encode("\n"), *encode(" ")}


def test_a_grammar_may_begin_as_the_tag_does() -> None:
    grammar = may_think(Grammar.regex("<[a-z]+>"))
    for text in ("<table>", "<thing>", "<think>no</think><a>", "<t>"):
        assert takes(grammar, text), text
    assert not takes(grammar, "<think>")  # the tag opens the reasoning, whatever the grammar says
    assert not takes(grammar, "<think>no</think>")
    spaced = may_think(Grammar.regex(" *x"))
    assert takes(spaced, "    x")
    assert takes(spaced, "    <think>y</think>  x")


def test_a_tag_that_is_a_special_token_opens_too() -> None:
    tokenizer = make()
    compiler = GrammarCompiler(tokenizer, tokenizer.size, [EOS_ID])
    constraint = compiler.compile(Grammar("regex", "[0-9]", begin_after="<|assistant|>", opened_by="<|user|>"))
    assert {3, *encode("7")} <= set(permitted(constraint.mask([])))
    assert accepts(constraint, [3, *encode("Hm"), 4, *encode("7")], EOS_ID)


def test_a_token_that_was_not_permitted_ends_in_a_mask_of_nothing() -> None:
    constraint = COMPILER.compile(Grammar.regex("a"))
    assert permitted(constraint.mask(encode("z"))) == []
    assert permitted(constraint.mask(encode("za"))) == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (
            Grammar.json_schema({"properties": {"a": {"not": {}}}}),
            r"grammar\.properties\.a\.not: got a keyword that is not supp",
        ),
        (Grammar.json_schema({"type": "wrong"}), "grammar: got Invalid type: wrong; expected one that can be enforced"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "grammar: got Unsatisfiable schema"),
        (Grammar.json_schema(False), "grammar: got false, under which nothing is valid"),
        (Grammar.json_schema({"$ref": "http://example.com/x"}), "grammar: got Resource"),
        (Grammar.json_schema({"$ref": "#/nowhere"}), "grammar: got "),
        (Grammar.json_schema({"type": "string", "format": "made-up"}), "grammar: got Unknown format: made-up"),
        (Grammar.json_schema({"oneOf": [{"type": "string"}, {"minLength": 2}]}), "grammar: got oneOf"),
        (Grammar.json_schema({"type": "string", "pattern": "(?=a)"}), "grammar: got regex parse error"),
        (Grammar("json_schema", "{"), "grammar: got broken JSON"),
        (Grammar("json_schema", "[" * 100_000), "grammar: got broken JSON"),
        (Grammar.regex("(a"), "grammar: got "),
        (Grammar("lark", "start: other"), "grammar: got "),
    ],
)
def test_what_cannot_be_enforced_is_refused(grammar: Grammar, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_grammar(grammar)
    with pytest.raises(InputError, match=message):
        COMPILER.compile(grammar)


def test_a_model_without_end_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="grammar: got a model without end tokens"):
        GrammarCompiler(TOKENIZER, TOKENIZER.size, ()).compile(Grammar.regex("a"))


def test_without_llguidance_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    calls: list[Callable[[], object]] = [
        lambda: check_grammar(Grammar.regex("a")),
        GrammarCompiler(TOKENIZER, 10, [EOS_ID]).warm_up,
    ]
    for call in calls:
        with pytest.raises(
            InputError, match=r"grammar: got an installation without llguidance; .* pip install 'eightfold\[server\]'"
        ):
            call()


def test_lately_used_grammars_are_kept_and_others_go() -> None:
    compiler = GrammarCompiler(TOKENIZER, TOKENIZER.size, [EOS_ID])
    for number in range(200):
        compiler.compile(Grammar.regex(f"a{number}"))
        compiler.compile(Grammar.regex("kept", begin_after=f"</{number}>"))
    assert len(compiler._compiled) == 64
    assert len(compiler._beginnings) <= 64


def test_a_tokenizer_with_byte_fallback_works_too() -> None:
    tokenizer = make(byte_fallback(), chat_template=None)
    compiler = GrammarCompiler(tokenizer, tokenizer.size, [2])
    walked = random_walk(compiler.compile(Grammar.json_schema({"enum": ["é a", "the"]})), {2}, seed=1)
    assert json.loads(tokenizer.decode(walked)) in ("é a", "the")


def test_a_grammar_begins_after_a_text_in_several_tokens() -> None:
    grammar = Grammar.regex("[0-9]+", begin_after="</think>")
    thought = encode("I think hello.</think>")
    assert len(encode("</think>")) > 3
    constraint = COMPILER.compile(grammar)
    for length in range(len(thought)):
        allowed = permitted(constraint.mask(thought[:length]))
        assert thought[length] in allowed
        assert EOS_ID not in allowed
    assert accepts(COMPILER.compile(grammar), thought + encode("42"), EOS_ID)
    assert accepts(COMPILER.compile(grammar), thought + encode("\n\n42"), EOS_ID)
    assert not accepts(COMPILER.compile(grammar), thought + encode("\n\n\n42"), EOS_ID)
    assert not accepts(COMPILER.compile(grammar), thought + encode("x"), EOS_ID)
    assert not accepts(COMPILER.compile(grammar), thought, EOS_ID)


def test_a_real_tokenizer(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.size + 100, [2])
    compiler.warm_up()
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    grammar = Grammar.json_schema(schema | {"additionalProperties": False}, begin_after="</think>")
    answer = tokenizer.encode('Hm.</think>\n\n{"city": "Zürich"}', add_special_tokens=False)
    assert accepts(compiler.compile(grammar), answer, 2)
