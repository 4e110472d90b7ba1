"""Reading tool calls out of an answer: what the formats have in common.

Around a call there is text. Whitespace between that text and a call belongs to neither, and is dropped. What begins like a call
and has no function's name turns out to be text, and is told as text, tags included; but where the answer ends before it shows
which of the two it is, nothing of it is told. A call whose name was told stays a call: where its arguments are cut off, or are
no JSON, they are told as they came, and the client's JSON parser finds out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from eightfold.server.tools.deltas import CallArguments, CallStart, ContentText, Delta, MakeId, call_id
from eightfold.server.tools.reader import Broken, Parser, Steps

Outcome: TypeAlias = Literal["text", "cut", "whole"]
"""What became of what began like a call: text after all, a call that broke off, a whole call."""


class CallParser(Parser[Delta]):
    """Text and tool calls, from a text in pieces.

    Args:
        tools: functions that the request offers, as OpenAI describes them.
        make_id: names calls.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that it looks for. Some models have special tokens for them, which then have to show in the text."""

    make_id: ClassVar[MakeId] = staticmethod(call_id)
    other_keys: ClassVar[frozenset[str] | None] = None
    """Keys that a call in JSON may have beside its name and its arguments; None is any."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), *, make_id: MakeId | None = None) -> None:
        super().__init__()
        self._functions: Mapping[str, Mapping[str, Any]] = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._make_id = make_id or type(self).make_id
        self._num_calls = 0
        self._space = ""  # at the end of the content, told only once other text follows
        self._has_content = False
        self._after_call = False

    def _content(self, text: str) -> None:
        """Tell text, but whitespace at its end only when more follows, and none that touches a call."""
        kept = text.rstrip()
        if kept:
            # Text before calls and text after them are apart by the whitespace that stood before the first of these calls.
            space = self._space if self._has_content or not self._after_call else ""
            self._tell(ContentText(space + (kept.lstrip() if self._after_call else kept)))
            self._space, self._has_content, self._after_call = text[len(kept) :], True, False
        elif not self._after_call:
            self._space += text

    def _end_content(self) -> None:
        """Tell the whitespace that no call followed."""
        if self._space and not self._after_call:
            self._tell(ContentText(self._space))

    def _drop(self, text: str) -> None:
        """Where text goes that nobody is to see."""

    def _start_call(self, name: str, given_id: str | None = None) -> int:
        index = self._num_calls
        self._num_calls += 1
        self._after_call = True
        self._tell(CallStart(index, given_id or self._make_id(), name))
        return index

    def _space_taken(self, also: str = "") -> Steps[str]:
        """Take whitespace, and the characters of `also`."""
        self._reader.record()
        yield from self._reader.skip_space(also)
        return self._reader.recorded()

    def _json_call(self, opening: str, *, tagged: bool = True) -> Steps[Outcome]:
        """Read `{"name": ..., "arguments": {...}}`; Llama calls the latter "parameters".

        Args:
            opening: what was taken before it. Where it is no call, that is content too.
            tagged: whether a tag, or another call, says that it is one.
        """
        call = _JsonCall()
        self._reader.record()
        try:
            yield from self._members(call)
            self._name_call(call)
        except Broken:
            if call.index is None and not (tagged and self._reader.is_cut_off()):
                self._content(opening + self._reader.recorded())
                return "text"
            return "cut"
        if call.num_characters == 0:
            self._say_arguments(call, "{}")
        return "whole"

    def _members(self, call: _JsonCall) -> Steps[None]:
        reader = self._reader
        if (yield from reader.skip_space()) != "{":
            raise Broken
        reader.take(1)
        while (yield from reader.skip_space(",")) != "}":
            key = _decoded((yield from reader.json_string()))
            if (yield from reader.skip_space()) != ":":
                raise Broken
            reader.take(1)
            following = yield from reader.skip_space()
            if key == "name" and call.name is None:
                call.name = _decoded((yield from reader.json_string()))
                self._check_call(call)
            elif key in ("arguments", "parameters") and call.num_characters == 0:
                if call.name is not None:
                    self._name_call(call)
                yield from self._json_arguments(call, following)
            elif self.other_keys is None or key in self.other_keys:
                yield from reader.json_value(self._drop)
            else:
                raise Broken
        reader.take(1)

    def _json_arguments(self, call: _JsonCall, following: str) -> Steps[None]:
        if following in ("{", "["):
            yield from self._reader.json_value(lambda text: self._say_arguments(call, text))
            return
        # A text that holds JSON, or null for none: told when it is whole.
        parts: list[str] = []
        yield from self._reader.json_value(parts.append)
        text = "".join(parts)
        self._say_arguments(call, "{}" if text == "null" else _decoded(text) if following == '"' else text)

    def _name_call(self, call: _JsonCall) -> None:
        """Tell that a call begins, where that was not told, and what is known of its arguments."""
        if call.index is not None:
            return
        self._check_call(call)
        self._reader.recorded()
        call.index = self._start_call(call.name or "")
        if call.early:
            self._tell(CallArguments(call.index, "".join(call.early)))

    def _check_call(self, call: _JsonCall) -> None:
        if call.name is None or not self._is_function(call.name):
            raise Broken

    def _say_arguments(self, call: _JsonCall, text: str) -> None:
        call.num_characters += len(text)
        if call.index is None:
            call.early.append(text)
        else:
            self._tell(CallArguments(call.index, text))

    def _is_function(self, name: str) -> bool:
        """Whether a call of this name is one. Between tags any is: the client knows what it offered."""
        return bool(name)


@dataclass(slots=True)
class _JsonCall:
    """A call that is being read: `early` are arguments that came before the name."""

    name: str | None = None
    index: int | None = None
    num_characters: int = 0
    early: list[str] = field(default_factory=list)


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as error:
        raise Broken from error
