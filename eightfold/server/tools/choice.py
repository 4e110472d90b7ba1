"""`tool_choice`: grammars that make a model call a function, in the words of its format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from eightfold.errors import InputError
from eightfold.grammar.compiler import check_grammar
from eightfold.server.fields import refuse_unknown, shown
from eightfold.server.tools.detect import tool_format
from eightfold.server.tools.typed import types_of
from eightfold.types import Grammar

_NO_IDS: Mapping[str, int] = MappingProxyType({})
_TEXT_VALUE = 'value[suffix="\\n</parameter>\\n"]: /(?s:.*)/'
_DEFINITIONS = ("$defs", "definitions")
# Spaces as models write them in calls, and no more: a forced call need not be pretty.
_SPACING: Mapping[str, Any] = MappingProxyType(
    {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
)


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any] | None,
    name: str,
    *,
    special_ids: Mapping[str, int] = _NO_IDS,
    parallel: bool = True,
) -> Grammar | None:
    """The grammar that a `tool_choice` demands; None where the model is free.

    Arguments follow the function's schema. Where a format writes them as plain text, texts follow its "enum" alone.

    Args:
        tools: what the request offers, as OpenAI describes it.
        choice: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`.
        name: of the format of tool calls.
        special_ids: the tokenizer's special tokens, which a grammar names by id.
        parallel: whether "required" may be several calls. A named function is called once.

    Raises:
        InputError: no tools, a function that is not offered, a schema that cannot be enforced. `what` is the field's path.
    """
    if choice is None or choice in ("auto", "none"):
        return None
    format_name = tool_format(name)
    functions = _chosen(tools, choice)
    several = parallel and choice == "required"
    writer = _Writer(special_ids)
    match format_name:
        case "hermes":
            writer.hermes(functions, several)
        case "llama3":
            writer.rule("start", writer.json_call(functions, "parameters"))
        case "mistral":
            writer.mistral(functions, several)
        case "qwen3_coder":
            writer.xml(functions, several)
        case "gpt-oss":
            writer.harmony(functions)
    return Grammar("lark", "\n".join(writer.rules), name="tool_choice")


def _chosen(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions that may be called, each with a schema for its arguments."""
    if not tools:
        raise InputError("tool_choice", got=shown(choice), expected="tools beside it")
    wanted: object = None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        wanted = function.get("name") if isinstance(function, Mapping) else None
    if choice != "required" and (
        not isinstance(wanted, str) or not isinstance(choice, Mapping) or choice.get("type") != "function"
    ):
        expected = '"auto", "none", "required", or {"type": "function", "function": {"name": "..."}}'
        raise InputError("tool_choice", got=shown(choice), expected=expected)
    if isinstance(choice, Mapping):
        refuse_unknown(choice, ("type", "function"), "tool_choice")
        refuse_unknown(choice["function"], ("name",), "tool_choice.function")
    functions: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if wanted in (None, function["name"]):
            schema = {"type": "object", **(function.get("parameters") or {"properties": {}, "additionalProperties": False})}
            # Checked by itself, since an error in the grammar of all calls would not say whose it is.
            check_grammar(replace(Grammar.json_schema(schema), name=f"tools[{index}].function.parameters"))
            functions.append({"name": function["name"], "parameters": schema})
    if not functions:
        offered = ", ".join(tool["function"]["name"] for tool in tools)
        raise InputError("tool_choice.function.name", got=repr(wanted), expected=f"one of the tools: {offered}")
    return functions


class _Writer:
    """Writes rules in llguidance's Lark."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special_ids = special_ids

    def rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def tag(self, text: str) -> str:
        """A tag, by id where the tokenizer has a special token for it: such a token is no text to llguidance."""
        return f"<[{self._special_ids[text]}]>" if text in self._special_ids else _literal(text)

    def hermes(self, functions: Sequence[Mapping[str, Any]], several: bool) -> None:
        call = self.rule("call", f'{self.tag("<tool_call>")} "\\n" json_call "\\n" {self.tag("</tool_call>")}')
        self.rule("json_call", self.json_call(functions, "arguments"))
        self._calls(call, several)

    def mistral(self, functions: Sequence[Mapping[str, Any]], several: bool) -> None:
        start = self.tag("[TOOL_CALLS]")
        if "[ARGS]" in self._special_ids:
            for index, function in enumerate(functions):
                body = f"{start} {_literal(function['name'])} {self.tag('[ARGS]')} %json {_json(function['parameters'])}"
                self.rule(f"call_{index}", body)
            self.rule("call", " | ".join(f"call_{index}" for index in range(len(functions))))
            self.rule("start", "call+" if several else "call")
            return
        count = {"minItems": 1} if several else {"minItems": 1, "maxItems": 1}
        calls = {"$defs": _definitions(functions), "type": "array", "items": _any_call(functions, "arguments"), **count}
        self.rule("start", f"{start} %json {_json(calls)}")

    def xml(self, functions: Sequence[Mapping[str, Any]], several: bool) -> None:
        names = []
        for index, function in enumerate(functions):
            schema = function["parameters"]
            parts = [
                self._parameter(f"parameter_{index}_{place}", schema, key) + ("" if key in schema.get("required", ()) else "?")
                for place, key in enumerate(schema.get("properties", {}))
            ]
            opening, closing = _literal(f"<function={function['name']}>\n"), _literal("</function>\n")
            names.append(self.rule(f"function_{index}", " ".join([opening, *parts, closing])))
        self.rules.append(_TEXT_VALUE)
        start, end = self.tag("<tool_call>"), self.tag("</tool_call>")
        self._calls(self.rule("call", f'{start} "\\n" ({" | ".join(names)}) {end}'), several)

    def harmony(self, functions: Sequence[Mapping[str, Any]]) -> None:
        message, channel = self.tag("<|message|>"), self.tag("<|channel|>")
        for index, function in enumerate(functions):
            recipient = _literal(f"commentary to=functions.{function['name']} ")
            body = f'{channel} {recipient} {self.tag("<|constrain|>")} "json" {message} %json {_json(function["parameters"])}'
            self.rule(f"call_{index}", body)
        end = self.tag("<|end|>")
        if end.startswith("<["):
            text = self.rule("text", f"/(?s:.*)/ {end}")
        else:
            text = "text"
            self.rules.append(f"text[suffix={end}]: /(?s:.*)/")
        self.rule("thought", f'{channel} "analysis" {message} {text} {self.tag("<|start|>")} "assistant"')
        self.rule("start", f"thought? ({' | '.join(f'call_{index}' for index in range(len(functions)))})")

    def json_call(self, functions: Sequence[Mapping[str, Any]], arguments: str) -> str:
        """One call as an object."""
        return f"%json {_json({'$defs': _definitions(functions), **_any_call(functions, arguments)})}"

    def _calls(self, call: str, several: bool) -> None:
        self.rule("start", f'{call} ("\\n" {call})*' if several else call)

    def _parameter(self, name: str, schema: Mapping[str, Any], key: str) -> str:
        part = schema["properties"][key]
        opening = _literal(f"<parameter={key}>\n")
        values = part.get("enum", [part["const"]] if "const" in part else None) if isinstance(part, Mapping) else None
        if types_of(schema, key) > {"string"} or not types_of(schema, key) <= {"string"}:
            definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
            body = f'%json {_json({**definitions, **part})} "\\n</parameter>\\n"'
        elif isinstance(values, list) and values:
            body = f'({" | ".join(_literal(str(value)) for value in values)}) "\\n</parameter>\\n"'
        else:
            body = "value"
        return self.rule(name, f"{opening} {body}")


def _any_call(functions: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, arguments: {"$ref": f"#/$defs/{index}"}},
                "required": ["name", arguments],
                "additionalProperties": False,
            }
            for index, function in enumerate(functions)
        ]
    }


def _definitions(functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The functions' schemas as definitions of one schema."""
    return {str(index): _rebased(item["parameters"], f"#/$defs/{index}") for index, item in enumerate(functions)}


def _rebased(part: Any, root: str) -> Any:
    """A schema whose references start from another place."""
    if isinstance(part, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
            else _rebased(value, root)
            for key, value in part.items()
        }
    return [_rebased(item, root) for item in part] if isinstance(part, list) else part


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": dict(_SPACING)}, ensure_ascii=False)
