"""How a chat's answers are read and what they have to be: reasoning, tool calls, and a grammar, from a body and its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from eightfold.errors import InputError
from eightfold.server.answers import Serving
from eightfold.server.protocol import ChatBody
from eightfold.server.reasoning import AnswerParser, reasoning_for, reasoning_format
from eightfold.server.structure import grammar_of
from eightfold.server.tools.choice import tool_grammar
from eightfold.server.tools.detect import format_for, tool_format
from eightfold.text import Tokenizer
from eightfold.types import Grammar

NO_FORMAT = "none"
"""What a user names to have text left as it is."""

# Templates open or close the reasoning with the last few tokens of a prompt.
_LAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers to one chat are read.

    Attributes:
        make_parser: reads one answer; None where its text is its content.
        shown: special tokens that the parser has to see in the text.
        grammar: what the answers have to be, once the reasoning has ended.
    """

    make_parser: Callable[[], AnswerParser] | None
    shown: frozenset[int]
    grammar: Grammar | None


def chat_formats(tokenizer: Tokenizer, reasoning: str | None = None, tools: str | None = None) -> tuple[str | None, str | None]:
    """The formats of a model's reasoning and of its tool calls; None where it has none, or none that is known.

    Args:
        tokenizer: its chat template shows the formats.
        reasoning: the format that a user named, "none", or None to look.
        tools: the same of tool calls.

    Raises:
        InputError: a name that is not known.
    """
    template = tokenizer.template
    if reasoning not in (None, NO_FORMAT):
        reasoning_format(reasoning)
    if tools not in (None, NO_FORMAT):
        tools = tool_format(tools)
    found = (reasoning or reasoning_for(template), tools or format_for(template))
    return tuple(None if name == NO_FORMAT else name for name in found)  # type: ignore[return-value]  # of two, two


def reading_of(serving: Serving, body: ChatBody, token_ids: Sequence[int]) -> Reading:
    """How the answers to a chat are read.

    Args:
        serving: names the model's formats.
        body: what was asked.
        token_ids: its prompt.

    Raises:
        InputError: tools that this model cannot be given, a choice among them that cannot be made, a malformed grammar.
    """
    prompt = serving.tokenizer.decode(token_ids[-_LAST_TOKENS:], skip_special_tokens=False)
    # An answer that goes on from a message is past the reasoning.
    reasoning = None if body.continue_final_message else serving.reasoning
    offered = offered_tools(body)
    grammar = grammar_of(body)
    if offered:
        grammar = _with_tools(serving, body, grammar)
    if grammar is not None and reasoning is not None:
        grammar = _around_reasoning(grammar, reasoning, prompt)
    if reasoning is None and not offered:
        return Reading(None, frozenset(), grammar)
    make_parser = partial(
        AnswerParser, reasoning, serving.tools if offered else None, offered, prompt=prompt, tagged=grammar is not None
    )
    return Reading(make_parser, serving.tokenizer.special_ids_in(make_parser().markers), grammar)


def offered_tools(body: ChatBody) -> Sequence[Mapping[str, Any]]:
    """The tools that the model may call.

    Raises:
        InputError: a call is demanded, and there are no tools.
    """
    if body.tool_choice == "none":
        return ()
    if body.tool_choice not in (None, "auto") and not body.tools:
        raise InputError("tool_choice", got=repr(body.tool_choice), expected='"none" or "auto", since there are no tools')
    return body.tools


def _with_tools(serving: Serving, body: ChatBody, grammar: Grammar | None) -> Grammar | None:
    """The grammar of an answer that may call tools, or has to."""
    if serving.tools is None:
        raise InputError(
            "tools",
            got=f"{len(body.tools)} of them",
            expected="none: it is not known how this model writes tool calls",
            remedy="--tool-call-parser of the server names the way.",
        )
    if grammar is not None:
        raise InputError(
            "tools",
            got="tools beside a grammar, which leaves no room for a call",
            expected='one of the two, or "tool_choice": "none"',
        )
    return tool_grammar(
        body.tools,
        body.tool_choice,
        serving.tools,
        special_ids=serving.tokenizer.special_tokens,
        parallel=body.parallel_tool_calls,
    )


def _around_reasoning(grammar: Grammar, reasoning: str, prompt: str) -> Grammar:
    """A grammar that leaves the reasoning free: behind its end where the prompt opens it, else only where the answer does."""
    its_format = reasoning_format(reasoning)
    if its_format.end is None or its_format.closed_by(prompt):
        return grammar
    opened_by = "" if its_format.started_by(prompt) else its_format.start
    return replace(grammar, begin_after=its_format.end, opened_by=opened_by)
