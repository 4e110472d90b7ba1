"""Answers as models write them, each with what it means."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    function(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        unit={"$ref": "#/$defs/Unit"},
        options={"type": "object"},
        exact={"type": "boolean"},
        zone={"anyOf": [{"type": "string"}, {"type": "null"}]},
        load={"type": "number"},
        places={"type": "array", "items": {"type": "string"}},
    ),
    function("write_file", path={"type": "string"}, text={"type": "string"}),
    function("now"),
]


def having(arguments: str, text: str) -> str:
    return text.replace("@", arguments)


@dataclass(frozen=True)
class Answer:
    text: str
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""


PARIS = '{"city": "Paris"}'
ROME = '{"city": "Rome", "days": 3}'
TRICKY = r'{"path": "a.c", "text": "int main() { return \"}]\\\" </tool_call> \"[0]; }\n"}'
UNICODE = '{"city": "São Paulo 東京 🗼", "note": "\\u00e9\\ud83d\\ude00"}'
NESTED = '{"options": {"a": [1, {"b": [[], {}]}], "c": "}"}, "days": -1.5e3}'

HERMES = [
    Answer(having(PARIS, '<tool_call>\n{"name": "get_weather", "arguments": @}\n</tool_call>'), calls=[("get_weather", PARIS)]),
    Answer(
        having(ROME, 'Let me look.\n\n<tool_call>{"name": "get_weather", "arguments": @}</tool_call>'),
        "Let me look.",
        [("get_weather", ROME)],
    ),
    Answer(
        having(
            PARIS,
            '<tool_call>\n{"name": "get_weather", "arguments": @}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}'
            "\n</tool_call>",
        ),
        calls=[("get_weather", PARIS), ("now", "{}")],
    ),
    Answer(
        having(
            PARIS,
            'Hi <tool_call>{"name": "now"}</tool_call> & <tool_call>{"arguments": @, "name": "get_weather"}</tool_call>done.',
        ),
        "Hi & done.",
        [("now", "{}"), ("get_weather", PARIS)],
    ),
    Answer(having(TRICKY, '<tool_call>{"name": "write_file", "arguments": @}</tool_call>'), calls=[("write_file", TRICKY)]),
    Answer(having(UNICODE, '<tool_call>{"name": "get_weather", "arguments": @}</tool_call>'), calls=[("get_weather", UNICODE)]),
    Answer(
        having(NESTED, '<tool_call>{"id": [{"x": "]"}], "name": "get_weather", "arguments": @}</tool_call>'),
        calls=[("get_weather", NESTED)],
    ),
    Answer(
        having(PARIS, '<tool_call>\n{"name": "now", "arguments": null}\n{"name": "get_weather", "arguments": @}\n</tool_call>'),
        calls=[("now", "{}"), ("get_weather", PARIS)],
    ),
    Answer(
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=[("get_weather", PARIS)],
    ),
    Answer("if a < b and <tool> or <tool_calls: 3 <", "if a < b and <tool> or <tool_calls: 3 <"),
    Answer("An empty <tool_call></tool_call> is text. ", "An empty <tool_call></tool_call> is text. "),
    Answer("<tool_call> get_weather(Paris) </tool_call>", "<tool_call> get_weather(Paris) </tool_call>"),
    Answer('  <tool_call>{"name": 5}</tool_call>\n', '  <tool_call>{"name": 5}</tool_call>\n'),
    Answer('Hm <tool_call>{"name": "get_wea', "Hm "),
    Answer('<tool_call>{"name": "get_weather", "arguments": {"city": "Par', calls=[("get_weather", '{"city": "Par')]),
    Answer('<tool_call>{"name": "get_weather", "arguments": {"city": "a\\', calls=[("get_weather", '{"city": "a\\')]),
    Answer(
        '<tool_call>{"name": "get_weather", "arguments": {"city": [1}}</tool_call> after',
        "after",
        [("get_weather", '{"city": [1')],
    ),
    Answer(having(PARIS, '<tool_call>{"name": "get_weather", "arguments": @</tool_call>ok'), "ok", [("get_weather", PARIS)]),
    Answer(having(PARIS, '<tool_call>{"name": "get_weather", "arguments": @}}</tool_call>'), calls=[("get_weather", PARIS)]),
    Answer('<tool_call>{"name": "now", "arguments": {}} no end tag', "no end tag", [("now", "{}")]),
]


def xml(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


XML = [
    Answer(xml("get_weather", city="Paris"), calls=[("get_weather", PARIS)]),
    Answer("Sure:\n" + xml("get_weather", city="Rome", days="3"), "Sure:", [("get_weather", ROME)]),
    Answer(xml("now") + "\n" + xml("get_weather", city="Paris") + "\n", calls=[("now", "{}"), ("get_weather", PARIS)]),
    Answer(
        xml("write_file", path="a.py", text='\ndef f(x):\n    return "<b>" + x  # </param\n'),
        calls=[("write_file", '{"path": "a.py", "text": "\\ndef f(x):\\n    return \\"<b>\\" + x  # </param\\n"}')],
    ),
    Answer(
        xml("get_weather", options='{"a": [1, "}"], "b": {}}', exact="true", load="1.50", places='["x", "y"]'),
        calls=[
            ("get_weather", '{"options": {"a": [1, "}"], "b": {}}, "exact": true, "load": 1.50, "places": ["x", "y"]}'),
        ],
    ),
    Answer(
        xml("get_weather", exact="True", zone="None", options="not json", days="many", load="7"),
        calls=[
            ("get_weather", '{"exact": true, "zone": null, "options": "not json", "days": "many", "load": 7}'),
        ],
    ),
    Answer(
        xml("get_weather", city="42", zone="7", unit="celsius"),
        calls=[("get_weather", '{"city": "42", "zone": "7", "unit": "celsius"}')],
    ),
    Answer(
        xml("get_weather", city='São "Paulo" \\ 東京 🗼'), calls=[("get_weather", '{"city": "São \\"Paulo\\" \\\\ 東京 🗼"}')]
    ),
    Answer(xml("unknown", anything="5"), calls=[("unknown", '{"anything": "5"}')]),
    Answer(
        "<function=get_weather><parameter=city>Paris</parameter></function> ok",
        "ok",
        [("get_weather", PARIS)],
    ),
    Answer("<tool_call><function=now></tool_call> x", "x", [("now", "{}")]),
    Answer("a < b <tool_call> <functions> </tool_call>", "a < b <tool_call> <functions> </tool_call>"),
    Answer("<tool_call>\n<function=\nx>", "<tool_call>\n<function=\nx>"),
    Answer("<tool_call>\n<function=get_wea"),
    Answer("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", calls=[("get_weather", '{"city": "Par')]),
    Answer("<tool_call>\n<function=get_weather>\n<parameter=days>\n3", calls=[("get_weather", '{"days": ')]),
    Answer("<tool_call>\n<function=get_weather>\n<parameter=ci", calls=[("get_weather", "{")]),
    Answer(xml("get_weather", city="") + "bye", "bye", [("get_weather", '{"city": ""}')]),
]

LLAMA = [
    Answer(having(PARIS, '{"name": "get_weather", "parameters": @}'), calls=[("get_weather", PARIS)]),
    Answer(having(ROME, '\n\n{"type": "function", "name": "get_weather", "parameters": @}'), calls=[("get_weather", ROME)]),
    Answer(having(NESTED, '<|python_tag|>{"name": "get_weather", "parameters": @}'), calls=[("get_weather", NESTED)]),
    Answer(
        having(PARIS, '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": @}'),
        calls=[("now", "{}"), ("get_weather", PARIS)],
    ),
    Answer(
        having(
            PARIS,
            'I will.\n<|python_tag|>{"name": "now", "arguments": {}}<|python_tag|>{"name": "get_weather", "parameters": @}',
        ),
        "I will.",
        [("now", "{}"), ("get_weather", PARIS)],
    ),
    Answer(having(TRICKY, '{"name": "write_file", "parameters": @}'), calls=[("write_file", TRICKY)]),
    Answer(having(UNICODE, '{"name": "get_weather", "parameters": @}'), calls=[("get_weather", UNICODE)]),
    Answer('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}'),
    Answer('{"city": "Paris", "name": "now"}', '{"city": "Paris", "name": "now"}'),
    Answer('{"name": "other_function", "parameters": {}} ', '{"name": "other_function", "parameters": {}} '),
    Answer('Here: {"name": "now", "parameters": {}}', 'Here: {"name": "now", "parameters": {}}'),
    Answer('<|python_tag|>brave_search.call(query="x")', '<|python_tag|>brave_search.call(query="x")'),
    Answer('{"name": "now"} Done. ', "Done. ", [("now", "{}")]),
    Answer('{"name": "get_weather", "parameters": {"city": "Pa', calls=[("get_weather", '{"city": "Pa')]),
    Answer('{"name": "get_we', '{"name": "get_we'),
    Answer('{"name": "get_weather", "parameters": {"a": (]} and', calls=[("get_weather", '{"a": (')]),
    Answer("a < b; {x}", "a < b; {x}"),
]

MISTRAL = [
    Answer(having(PARIS, '[TOOL_CALLS][{"name": "get_weather", "arguments": @}]'), calls=[("get_weather", PARIS)]),
    Answer(
        having(ROME, 'Looking. [TOOL_CALLS] [{"name": "get_weather", "arguments": @}, {"name": "now", "arguments": {}}]'),
        "Looking.",
        [("get_weather", ROME), ("now", "{}")],
    ),
    Answer(having(PARIS, "[TOOL_CALLS]get_weather[ARGS]@"), calls=[("get_weather", PARIS)]),
    Answer(
        having(NESTED, "Both:\n[TOOL_CALLS]get_weather[ARGS]@[TOOL_CALLS]now[ARGS]{}"),
        "Both:",
        [("get_weather", NESTED), ("now", "{}")],
    ),
    Answer(having(PARIS, "[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]@"), calls=[("get_weather", PARIS)]),
    Answer(having(TRICKY, "[TOOL_CALLS]write_file[ARGS]@"), calls=[("write_file", TRICKY)]),
    Answer(having(UNICODE, '[TOOL_CALLS][{"arguments": @, "name": "get_weather"}]'), calls=[("get_weather", UNICODE)]),
    Answer('[TOOL_CALLS]{"name": "now", "arguments": {}} x', "x", [("now", "{}")]),
    Answer("a[0] < b [TOOL] [TOOL_CALLS", "a[0] < b [TOOL] [TOOL_CALLS"),
    Answer("[TOOL_CALLS] none needed", "[TOOL_CALLS] none needed"),
    Answer("[TOOL_CALLS]get_weather[ARGS] nothing", "[TOOL_CALLS]get_weather[ARGS] nothing"),
    Answer('[TOOL_CALLS][{"nam'),
    Answer('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city"', calls=[("get_weather", '{"city"')]),
    Answer('[TOOL_CALLS]get_weather[ARGS]{"city": "Par', calls=[("get_weather", '{"city": "Par')]),
    Answer("[TOOL_CALLS]get_weather[ARGS]{]} left[TOOL_CALLS]now[ARGS]{}", calls=[("get_weather", "{"), ("now", "{}")]),
    Answer('[TOOL_CALLS][{"name": "now", "arguments": {}}, "odd"]', '"odd"]', [("now", "{}")]),
]


def harmony(channel: str, text: str, end: str = "<|end|>") -> str:
    return f"<|channel|>{channel}<|message|>{text}{end}"


CALL = "commentary to=functions.get_weather <|constrain|>json"
HARMONY = [
    Answer(
        harmony("analysis", "Need weather.") + "<|start|>assistant" + harmony(CALL, PARIS, "<|call|>"),
        calls=[("get_weather", PARIS)],
        reasoning="Need weather.",
    ),
    Answer(harmony("analysis", "Easy.") + "<|start|>assistant" + harmony("final", "Four.\n", ""), "Four.\n", reasoning="Easy."),
    Answer(harmony("final", "a < b <| c", "<|return|>"), "a < b <| c"),
    Answer(
        harmony("commentary", "I will check. ") + "<|start|>assistant" + harmony(CALL, ROME, ""),
        "I will check.",
        [("get_weather", ROME)],
    ),
    Answer(
        "<|start|>assistant to=functions.get_weather" + harmony("commentary json", NESTED, "<|call|>"),
        calls=[("get_weather", NESTED)],
    ),
    Answer(
        harmony(CALL, UNICODE, "<|call|>") + "<|start|>assistant" + harmony("commentary to=functions.now", "", "<|call|>"),
        calls=[("get_weather", UNICODE), ("now", "{}")],
    ),
    Answer(harmony("commentary to=functions.write_file json", TRICKY, ""), calls=[("write_file", TRICKY)]),
    Answer("No channels here.", "No channels here."),
    Answer(harmony("analysis", "cut off", ""), reasoning="cut off"),
    Answer(harmony("analysis", "x") + "<|start|>assistant<|channel|>comm", reasoning="x"),
    Answer(harmony(CALL, '{"city": "Par', ""), calls=[("get_weather", '{"city": "Par')]),
    Answer(harmony("analysis", "a", "") + harmony("final", "b"), "b", reasoning="a"),
    Answer(harmony("analysis to=python", "print(1)", "<|call|>"), reasoning="print(1)"),
]

RECORDED = {"hermes": HERMES, "qwen3_coder": XML, "llama3": LLAMA, "mistral": MISTRAL, "gpt-oss": HARMONY}
CASES = [(name, answer) for name, answers in RECORDED.items() for answer in answers]
