from __future__ import annotations

import pytest

from eightfold.errors import InputError
from eightfold.server.tools.detect import ALIASES, format_for, tool_format
from eightfold.server.tools.formats import PARSERS


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        ('within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>}', "qwen3", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=a>", "nemotron_h", "qwen3_coder"),
        ("{{ '<tool_call>\\n<function=' + name }}", "qwen3_moe", "qwen3_coder"),
        ('{{- "<|python_tag|>" + tool_call.name }}', "llama", "llama3"),
        ('Respond in the format {"name": function name, "parameters": dictionary}.<|eot_id|>', "llama", "llama3"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "", "gpt-oss"),
        ("", "gpt_oss", "gpt-oss"),
        ("{{ messages }}", "llama", None),
    ],
)
def test_the_template_shows_the_format(template: str, model_type: str, name: str | None) -> None:
    assert format_for(template, model_type) == name


def test_names_and_their_aliases() -> None:
    assert all(tool_format(name) == name for name in PARSERS)
    assert tool_format("qwen25") == "hermes"
    assert {tool_format(alias) for alias in ALIASES} <= PARSERS.keys()
    with pytest.raises(InputError, match=r"tool_call_parser: got pythonic; expected one of hermes, qwen3_coder, llama3"):
        tool_format("pythonic")
