"""What an answer is made of once it is read: content, reasoning, and tool calls, each in pieces."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of what the user is to see."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins.

    Attributes:
        index: its place among the calls of the answer, from 0.
        call_id: names it, so that a later message can give its result.
        name: the function.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of a call, which are a JSON text.

    Attributes:
        index: which call.
        text: the next characters.
    """

    index: int
    text: str


Delta: TypeAlias = ContentText | ReasoningText | CallStart | CallArguments
MakeId: TypeAlias = Callable[[], str]

_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """An id for a call, of the form that OpenAI's have."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """An id of nine letters and digits: Mistral's templates refuse others when they come back."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """A whole answer.

    Attributes:
        content: empty where the model only called tools.
        reasoning: empty where it did not think.
        calls: in their order.
    """

    content: str
    reasoning: str
    calls: list[Call]


def gather(deltas: Iterable[Delta]) -> Parsed:
    """The whole answer that deltas make."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for delta in deltas:
        match delta:
            case ContentText(text):
                content.append(text)
            case ReasoningText(text):
                reasoning.append(text)
            case CallStart(_, name_of_call, name):
                calls.append(Call(name_of_call, name))
            case CallArguments(index, text):
                calls[index].arguments += text
    return Parsed("".join(content), "".join(reasoning), calls)
