"""Splitting an answer into what the model thought and what it says, and the whole way from text to deltas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from eightfold.errors import InputError
from eightfold.server.tools.deltas import ContentText, Delta, MakeId, ReasoningText
from eightfold.server.tools.detect import tool_format
from eightfold.server.tools.formats import PARSERS
from eightfold.server.tools.reader import Parser, Steps

ReasoningName: TypeAlias = Literal["deepseek-r1", "qwen3", "nemotron_3", "gpt-oss"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        start: tag before it.
        end: tag after it; None where the reasoning has a channel of its own.
        always: the model thinks unless its prompt ends with an end tag, whether or not it writes the start tag.
    """

    start: str
    end: str | None
    always: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether the answer to a prompt begins inside the reasoning. The last characters of the prompt are enough."""
        end = prompt.rstrip()
        return self.end is not None and (end.endswith(self.start) or (self.always and not end.endswith(self.end)))

    def started_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the start tag."""
        return self.end is not None and prompt.rstrip().endswith(self.start)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt has the reasoning in it already, so that its answer has none."""
        return self.end is not None and prompt.rstrip().endswith(self.end)


REASONING: Mapping[ReasoningName, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "nemotron_3": ReasoningFormat("<think>", "</think>"),
    "gpt-oss": ReasoningFormat("<|channel|>analysis<|message|>", None),
}


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of `--reasoning-parser`.

    Raises:
        InputError: there is none of this name.
    """
    for known, its_format in REASONING.items():
        if name == known:
            return its_format
    raise InputError("reasoning_parser", got=name, expected=f"one of {', '.join(REASONING)}")


def reasoning_for(template: str) -> ReasoningName | None:
    """The reasoning format that the text of a chat template shows; None where it shows none."""
    if "<|channel|>" in template:
        return "gpt-oss"
    if "</think>" not in template and "<think>" not in template:
        return None
    return "nemotron_3" if "<function=" in template else "qwen3" if "<|im_start|>" in template else "deepseek-r1"


class ReasoningParser(Parser[ContentText | ReasoningText]):
    """Reasoning and content, from a text in pieces. Neither has the tags, nor the whitespace beside them.

    Args:
        its_format: the tags.
        opened: whether the text begins inside the reasoning; a start tag may still come first, and is dropped.
        trimmed: whether content without reasoning loses the whitespace before it too.
    """

    def __init__(self, its_format: ReasoningFormat, *, opened: bool, trimmed: bool = False) -> None:
        super().__init__()
        self._format = its_format
        self._opened = opened
        self._trimmed = trimmed
        self._space = ""
        self._begun = False

    def _parse(self) -> Steps[None]:
        reader, its_format = self._reader, self._format
        reader.record()
        yield from reader.skip_space()
        space = reader.recorded()
        started = yield from reader.goes_on_with(its_format.start)
        if (started is not None or self._opened) and its_format.end is not None:
            yield from reader.until(self._reasoning, its_format.end)
            yield from reader.skip_space()
        else:
            self._content("" if self._trimmed else space)
        yield from reader.until(self._content)

    def _reasoning(self, text: str) -> None:
        """Tell reasoning, but not the whitespace at its ends."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not self._begun:
            kept, self._space = kept.lstrip(), self._space if kept else ""
        if kept:
            self._begun = True
            self._tell(ReasoningText(kept))

    def _content(self, text: str) -> None:
        if text:
            self._tell(ContentText(text))


class AnswerParser:
    """From the text of one answer, in pieces, to its reasoning, tool calls and content.

    Args:
        reasoning: name of the reasoning format; None leaves the reasoning in the content.
        tools: name of the format of tool calls; None leaves calls in the content.
        offered: the functions that the request offers, as OpenAI describes them.
        prompt: the end of the prompt, special tokens included, in which a template may have opened the reasoning.
        tagged: whether the answer is held to a grammar, under which no reasoning goes without its start tag.
        make_id: names calls.

    Attributes:
        markers: texts that must reach `push`, also where the tokenizer has special tokens for them.

    Raises:
        InputError: a name that is not known.
    """

    def __init__(
        self,
        reasoning: str | None = None,
        tools: str | None = None,
        offered: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: str = "",
        tagged: bool = False,
        make_id: MakeId | None = None,
    ) -> None:
        its_format = None if reasoning is None else reasoning_format(reasoning)
        call_format = None if tools is None else tool_format(tools)
        self._calls = None if call_format is None else PARSERS[call_format](offered, make_id=make_id)
        self._thoughts: ReasoningParser | None = None
        if its_format is not None and its_format.end is None:
            self._calls = PARSERS["gpt-oss"](offered, make_id=make_id)  # reads channels of every kind
        elif its_format is not None and not its_format.closed_by(prompt):
            opened = its_format.started_by(prompt) if tagged else its_format.opened_by(prompt)
            self._thoughts = ReasoningParser(its_format, opened=opened, trimmed=tagged)
        tags = () if its_format is None or its_format.end is None else (its_format.start, its_format.end)
        self.markers = (*tags, *(self._calls.markers if self._calls is not None else ()))

    def push(self, text: str) -> list[Delta]:
        """What became certain with `text`."""
        return self._read(self._thoughts.push(text) if self._thoughts is not None else [ContentText(text)] if text else [])

    def finish(self) -> list[Delta]:
        """What is left, now that the text has ended."""
        deltas = self._read(self._thoughts.finish() if self._thoughts is not None else [])
        return [*deltas, *(self._calls.finish() if self._calls is not None else ())]

    def _read(self, parts: Iterable[Delta]) -> list[Delta]:
        if self._calls is None:
            return list(parts)
        deltas: list[Delta] = []
        for part in parts:
            deltas += self._calls.push(part.text) if isinstance(part, ContentText) else [part]
        return deltas
