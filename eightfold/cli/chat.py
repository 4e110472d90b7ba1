"""`eightfold chat`: a conversation in the terminal, or with a script at the other end of a pipe."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import closing
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from eightfold.cli.flags import Given, Verbose, takes_flags
from eightfold.cli.loading import load_llm
from eightfold.cli.output import complain, write
from eightfold.errors import InputError
from eightfold.hub.names import identify
from eightfold.types import SamplingParams

if TYPE_CHECKING:
    from eightfold.llm import LLM

COMMANDS: Mapping[str, str] = MappingProxyType(
    {"/help": "show this", "/reset": "forget the conversation", "/exit": "leave, as Ctrl-D does"}
)
_HELP = "\n".join([*(f"{name:<8}{what}" for name, what in COMMANDS.items()), "Ctrl-C  stop the answer"])


@takes_flags(defaults={"max_tokens": 1024})
def chat(
    given: Given,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.", show_default=False)] = None,
    verbose: Verbose = False,
) -> None:
    """Talk to a model. /help lists what else can be typed."""
    # A wrong name is refused before anything heavy is imported.
    identify(given.config.model, given.config.revision, needs_weights=given.config.needs_weights)
    llm = load_llm(given, verbose)
    if not llm.tokenizer.has_chat_template:
        llm.tokenizer.render_chat([])  # says why it cannot
    if sys.stdin.isatty():
        complain(f"{given.config.model}. /help for help, Ctrl-D to leave.")
        if importlib.util.find_spec("readline") is not None:
            import_module("readline")  # gives input() a history and line editing
    Conversation(llm, given.params, system).run()


class Conversation:
    """What was said, and the loop that goes on with it.

    Args:
        llm: answers.
        params: how.
        system: a system message that every conversation begins with.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._beginning)

    def run(self) -> None:
        """Read and answer until the input ends or /exit."""
        while (text := self._read()) is not None:
            if not text.strip():
                continue
            if text.startswith("/"):
                if text.strip() == "/exit":
                    return
                self._obey(text.strip())
            else:
                self._answer(text)

    def _read(self) -> str | None:
        """The next line; None at the end of the input."""
        is_terminal = sys.stdin.isatty()
        try:
            return input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                write()
            return None
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            complain("\nCtrl-D or /exit leaves.")
            return ""

    def _obey(self, command: str) -> None:
        if command == "/help":
            write(_HELP)
        elif command == "/reset":
            self.messages = list(self._beginning)
        else:
            near = get_close_matches(command, COMMANDS, n=1)
            complain(f"There is no {command}. " + (f"Did you mean {near[0]}?" if near else "/help lists what there is."))

    def _answer(self, text: str) -> None:
        """Stream one answer. What was shown becomes part of the conversation, also where Ctrl-C cut it."""
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            with closing(self._llm.stream(asked, self._params)) as stream:
                for event in stream:
                    pieces.append(event.text)
                    write(event.text, end="")
        except InputError as error:
            complain(f"{error} (/reset begins anew)")
            return
        except KeyboardInterrupt:
            write(" [stopped]", end="")
        write()
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
