"""Which format of tool calls a model writes."""

from __future__ import annotations

from collections.abc import Mapping

from eightfold.errors import InputError
from eightfold.server.tools.formats import PARSERS, FormatName

ALIASES: Mapping[str, FormatName] = {"qwen25": "hermes", "qwen": "hermes", "nemotron_3": "qwen3_coder"}
"""Other names that servers have for the same formats."""

# Marks in the text of a chat template, the more telling ones first.
_MARKS: tuple[tuple[str, FormatName], ...] = (
    ("<|channel|>", "gpt-oss"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
)
# Llama 3.1 and 3.2 spell the shape of a call out, and 3.2's small models have no tag for it.
_LLAMA_SHAPE = ('{"name": function name, "parameters":', "<|eot_id|>")
_BY_MODEL_TYPE: Mapping[str, FormatName] = {"gpt_oss": "gpt-oss"}


def tool_format(name: str) -> FormatName:
    """The format of `--tool-call-parser`.

    Raises:
        InputError: there is none of this name.
    """
    for known in PARSERS:
        if name == known:
            return known
    if name in ALIASES:
        return ALIASES[name]
    raise InputError("tool_call_parser", got=name, expected=f"one of {', '.join([*PARSERS, *ALIASES])}")


def format_for(template: str, model_type: str = "") -> FormatName | None:
    """The format that the text of a chat template shows; None where it shows none.

    Args:
        template: the template's source.
        model_type: the checkpoint's, where its template does not say.
    """
    for mark, name in _MARKS:
        if mark in template:
            return name
    if all(part in template for part in _LLAMA_SHAPE):
        return "llama3"
    return _BY_MODEL_TYPE.get(model_type)
