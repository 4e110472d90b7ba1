"""The five formats of tool calls, each a short grammar in code over `Reader`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from eightfold.server.tools.calls import CallParser
from eightfold.server.tools.deltas import CallArguments, ReasoningText, short_call_id
from eightfold.server.tools.reader import Broken, Steps
from eightfold.server.tools.typed import TypedValue, json_text, types_of

FormatName: TypeAlias = Literal["hermes", "qwen3_coder", "llama3", "mistral", "gpt-oss"]

_NAME = re.compile(r"[A-Za-z0-9_.\-]")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HermesParser(CallParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3."""

    markers = ("<tool_call>", "</tool_call>")

    def _parse(self) -> Steps[None]:
        start, end = self.markers
        say, sought = self._content, [start]
        while (marker := (yield from self._reader.until(say, *sought, cut=sought[1:]))) is not None:
            say, sought = self._content, [start]
            if marker == end:
                continue
            outcome = yield from self._json_call(start)
            # Some models write a stray bracket, or further calls, before the end tag.
            while outcome == "whole" and (yield from self._reader.skip_space("]}")) == "{":
                outcome = yield from self._json_call("")
            if outcome != "text":
                sought = [start, end]
            if outcome == "cut":
                say = self._drop
        self._end_content()


class LlamaParser(CallParser):
    """`{"name": "f", "parameters": {...}}` as the whole answer, or after `<|python_tag|>`; several with ";" between them.

    Nothing tells such a call from an answer in JSON but the name of a function that was offered.
    """

    markers = ("<|python_tag|>",)
    other_keys = frozenset({"type", "id"})

    def _parse(self) -> Steps[None]:
        opening = yield from self._space_taken()
        while True:
            say = self._content
            if (yield from self._reader.peek()) == "{":
                if (yield from self._calls(opening, tagged=self.markers[0] in opening)) == "cut":
                    say = self._drop
            elif self.markers[0] not in opening or not self._reader.is_cut_off():
                self._content(opening)
            if (yield from self._reader.until(say, *self.markers)) is None:
                break
            opening = self.markers[0] + (yield from self._space_taken())
        self._end_content()

    def _calls(self, opening: str, *, tagged: bool) -> Steps[str]:
        while True:
            outcome = yield from self._json_call(opening, tagged=tagged)
            if outcome != "whole":
                return outcome
            tagged = True
            opening = yield from self._space_taken(";,")
            if (yield from self._reader.peek()) != "{":
                if not self._reader.is_cut_off():
                    self._content(opening)
                return outcome

    def _is_function(self, name: str) -> bool:
        return name in self._functions


class MistralParser(CallParser):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`, and later `[TOOL_CALLS]f[ARGS]{...}` for each call."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    make_id = staticmethod(short_call_id)

    def _parse(self) -> Steps[None]:
        say = self._content
        while (yield from self._reader.until(say, self.markers[0])) is not None:
            opening = self.markers[0] + (yield from self._space_taken())
            following = yield from self._reader.peek()
            if following == "[":
                outcome = yield from self._list(opening + self._reader.take(1))
            elif following == "{":
                outcome = yield from self._json_call(opening)
            else:
                outcome = yield from self._named(opening)
            say = self._drop if outcome == "cut" else self._content
        self._end_content()

    def _list(self, opening: str) -> Steps[str]:
        while (outcome := (yield from self._json_call(opening))) == "whole":
            following = yield from self._reader.skip_space(",")
            if following != "{":
                if following == "]":
                    self._reader.take(1)
                break
            opening = ""
        return outcome

    def _named(self, opening: str) -> Steps[str]:
        reader = self._reader
        reader.record()
        name = yield from self._word()
        separator = yield from reader.goes_on_with("[ARGS]", "[CALL_ID]")
        given_id = None
        if separator == "[CALL_ID]":
            given_id = yield from self._word()
            separator = yield from reader.goes_on_with("[ARGS]")
        if not name or separator is None or (yield from reader.skip_space()) != "{":
            if reader.is_cut_off("[ARGS]", "[CALL_ID]"):
                return "cut"
            self._content(opening + reader.recorded())
            return "text"
        reader.recorded()
        index = self._start_call(name, given_id)
        try:
            yield from reader.json_value(lambda text: self._tell(CallArguments(index, text)))
        except Broken:
            return "cut"
        return "whole"

    def _word(self) -> Steps[str]:
        word = ""
        while _NAME.fullmatch((yield from self._reader.peek())):
            word += self._reader.take(1)
        return word


class XmlParser(CallParser):
    """`<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder and Nemotron 3.

    A value is text, with a line break of its own at each end. The function's JSON schema says what it stands for.
    """

    markers = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>")

    def _parse(self) -> Steps[None]:
        start, end, function = self.markers[:3]
        sought = [start, function]
        while (marker := (yield from self._reader.until(self._content, *sought, cut=sought[2:]))) is not None:
            sought = [start, function]
            if marker == end:
                continue
            if (yield from self._function(marker)):
                sought.append(end)
        self._end_content()

    def _function(self, opening: str) -> Steps[bool]:
        """Read one call behind its first tag; whether it was one."""
        reader = self._reader
        reader.record()
        is_function = opening == "<function="
        if not is_function:
            yield from reader.skip_space()
            is_function = (yield from reader.goes_on_with("<function=")) is not None
        name: list[str] = []
        if not is_function or (yield from reader.until(name.append, ">", "<", "\n")) != ">" or not "".join(name).strip():
            if reader.is_cut_off("<function="):
                yield from reader.until(self._drop)
                return False
            self._content(opening + reader.recorded())
            return False
        reader.recorded()
        function = "".join(name).strip()
        index = self._start_call(function)
        self._tell(CallArguments(index, "{"))
        schema = self._functions.get(function, {}).get("parameters", {})
        num_parameters = 0
        while (tag := (yield from reader.until(self._drop, "<parameter=", "</function>", "</tool_call>"))) == "<parameter=":
            yield from self._parameter(index, schema, ", " if num_parameters else "")
            num_parameters += 1
        if tag is not None:
            self._tell(CallArguments(index, "}"))
        return tag != "</tool_call>"

    def _parameter(self, index: int, schema: Mapping[str, Any], separator: str) -> Steps[None]:
        parts: list[str] = []
        if (yield from self._reader.until(parts.append, ">")) is None:
            return
        key = "".join(parts).strip()
        value = TypedValue(types_of(schema, key), lambda text: self._tell(CallArguments(index, text)))
        self._tell(CallArguments(index, f"{separator}{json_text(key)}: "))
        if (yield from self._reader.until(value.push, "</parameter>", cut=["</parameter>"])) is not None:
            value.finish()


class HarmonyParser(CallParser):
    """gpt-oss: messages such as `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`.

    The channel "analysis" is reasoning; "final", and "commentary" to nobody, are content. A header that breaks off is dropped.
    """

    markers = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")

    def _parse(self) -> Steps[None]:
        starts, ends = self.markers[:2], self.markers[4:]
        marker = yield from self._reader.until(self._content, *starts)
        while marker is not None:
            header = [marker]
            if (yield from self._reader.until(header.append, "<|message|>")) is None:
                break
            marker = yield from self._message("".join(header), (*starts, *ends))
            if marker in ends:
                marker = yield from self._reader.until(self._content, *starts)
        self._end_content()

    def _message(self, header: str, markers: tuple[str, ...]) -> Steps[str | None]:
        """Read a message up to the marker that ends it."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if recipient is None:
            is_reasoning = channel is not None and channel[1] == "analysis"
            return (yield from self._reader.until(self._reasoning if is_reasoning else self._content, *markers))
        index, parts = self._start_call(recipient[1]), 0

        def say(text: str) -> None:
            nonlocal parts
            parts += 1
            self._tell(CallArguments(index, text))

        marker = yield from self._reader.until(say, *markers, cut=markers)
        if marker is not None and parts == 0:
            say("{}")
        return marker

    def _reasoning(self, text: str) -> None:
        self._tell(ReasoningText(text))


PARSERS: Mapping[FormatName, type[CallParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": XmlParser,
    "llama3": LlamaParser,
    "mistral": MistralParser,
    "gpt-oss": HarmonyParser,
}
