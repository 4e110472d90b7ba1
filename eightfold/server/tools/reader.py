"""Reading a text that comes in pieces as though it were whole.

A parser is a generator that yields wherever it has to wait for more text. It reads through a `Reader` alone, and the reader
never tells it where the pieces were cut: it says of a text only what no later text can change. So a parser finds the same in a
text however it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Event = TypeVar("Event")

Steps: TypeAlias = Generator[None, None, T]
"""Code that waits for text with `yield` and ends with a T."""

_OUTSIDE = re.compile(r'["{}\[\]<]')  # what matters between the strings of a JSON text; "<" has no place there
_INSIDE = re.compile(r'["\\]')
_SPACE = " \t\r\n"


class Broken(Exception):  # noqa: N818  # it is caught one frame above, and no user meets it
    """The text is not what its format says."""


class Reader:
    """The text that has come and was not taken yet."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._recorded: list[str] | None = None

    def push(self, text: str) -> None:
        """More text has come."""
        self._text += text

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def record(self) -> None:
        """Keep all text that is taken from here on, for `recorded`."""
        self._recorded = []

    def recorded(self) -> str:
        """What was taken since `record`, which ends here."""
        kept, self._recorded = "".join(self._recorded or ()), None
        return kept

    def take(self, count: int) -> str:
        """Remove the next characters, which are there."""
        taken, self._text = self._text[:count], self._text[count:]
        if self._recorded is not None:
            self._recorded.append(taken)
        return taken

    def is_cut_off(self, *markers: str) -> bool:
        """Whether the text has ended, in nothing but the beginning of a marker where any is left."""
        return self._ended and (not self._text or any(marker.startswith(self._text) for marker in markers))

    def peek(self) -> Steps[str]:
        """The next character, left where it is; empty at the end."""
        while not self._text and not self._ended:
            yield
        return self._text[:1]

    def skip_space(self, also: str = "") -> Steps[str]:
        """Take whitespace, and characters of `also`; what follows is peeked at, as by `peek`."""
        while True:
            following = yield from self.peek()
            if not following or following not in _SPACE + also:
                return following
            self.take(len(self._text) - len(self._text.lstrip(_SPACE + also)))

    def goes_on_with(self, *markers: str) -> Steps[str | None]:
        """Take the marker that comes next; None where none does. No marker may begin another."""
        while True:
            for marker in markers:
                if self._text.startswith(marker):
                    self.take(len(marker))
                    return marker
            if self._ended or not any(marker.startswith(self._text) for marker in markers):
                return None
            yield

    def until(self, say: Callable[[str], None], *markers: str, cut: Sequence[str] = ()) -> Steps[str | None]:
        """Hand text to `say` as it becomes certain, up to the first marker, which is taken too; None at the end of the text.

        Args:
            say: takes the text.
            markers: end it.
            cut: markers of which the beginning, where the whole text ends in it, is no text but a marker that was cut off.
        """
        while True:
            found = min(((at, marker) for marker in markers if (at := self._text.find(marker)) >= 0), default=None)
            if found is not None:
                self._say(say, found[0])
                self.take(len(found[1]))
                return found[1]
            if self._ended:
                num_cut = max((_overlap(self._text, marker) for marker in cut), default=0)
                self._say(say, len(self._text) - num_cut)
                self.take(num_cut)
                return None
            self._say(say, len(self._text) - max((_overlap(self._text, marker) for marker in markers), default=0))
            yield

    def json_string(self) -> Steps[str]:
        """The text of a JSON string, its quotes included.

        Raises:
            Broken: it does not begin with a quote, or never ends.
        """
        parts: list[str] = []
        yield from self._json_string(parts.append)
        return "".join(parts)

    def json_value(self, say: Callable[[str], None]) -> Steps[None]:
        """Hand the text of one JSON value to `say`, piece by piece. Its brackets and quotes are matched, no more.

        Raises:
            Broken: there is none, or it never ends. What came of it was said.
        """
        following = yield from self.peek()
        if following == '"':
            yield from self._json_string(say)
        elif following in ("{", "["):
            yield from self._json_container(say)
        else:
            yield from self._json_literal(say)

    def _json_string(self, say: Callable[[str], None]) -> Steps[None]:
        if (yield from self.peek()) != '"':
            raise Broken
        say(self.take(1))
        while True:
            found = _INSIDE.search(self._text)
            self._say(say, found.start() if found else len(self._text))
            if (yield from self.peek()) == "":
                raise Broken
            if self._text[0] == '"':
                say(self.take(1))
                return
            if self._text[0] == "\\":
                while len(self._text) < 2 and not self._ended:
                    yield
                say(self.take(2))

    def _json_container(self, say: Callable[[str], None]) -> Steps[None]:
        closers: list[str] = []
        while True:
            found = _OUTSIDE.search(self._text)
            self._say(say, found.start() if found else len(self._text))
            match (yield from self.peek()):
                case '"':
                    yield from self._json_string(say)
                case "{" | "[" as opener:
                    closers.append("}" if opener == "{" else "]")
                    say(self.take(1))
                case "}" | "]" as closer:
                    if closer != closers.pop():
                        raise Broken
                    say(self.take(1))
                    if not closers:
                        return
                case "" | "<":
                    raise Broken
                case _:
                    pass  # text that came while peeking

    def _json_literal(self, say: Callable[[str], None]) -> Steps[None]:
        length = 0
        while (following := (yield from self.peek())) and (following.isalnum() or following in "+-."):
            say(self.take(1))
            length += 1
        if length == 0:
            raise Broken

    def _say(self, say: Callable[[str], None], count: int) -> None:
        if count:
            say(self.take(count))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` goes on from."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


class Parser(Generic[Event]):
    """Runs the generator of a subclass over a text that comes in pieces, and hands on what it tells."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._told: list[Event] = []
        self._steps = self._parse()
        self._is_done = False

    def push(self, text: str) -> list[Event]:
        """What became certain with `text`."""
        self._reader.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """What is left, now that the text has ended."""
        self._reader.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        if not self._is_done:
            try:
                next(self._steps)
            except StopIteration:
                self._is_done = True
        told, self._told = self._told, []
        return told

    def _tell(self, event: Event) -> None:
        self._told.append(event)

    def _parse(self) -> Steps[None]:
        raise NotImplementedError
