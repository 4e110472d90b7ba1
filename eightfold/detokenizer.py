"""Answers as text, token by token.

Two things hold a piece of an answer back: a character whose bytes have not all come, and text that may turn out to begin a stop
text. Put together, the pieces are the text of the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eightfold.text import Tokenizer
from eightfold.types import FinishReason, Request, TokenEvent, TokenLogprobs

REPLACEMENT = "\ufffd"
"""What a decoder puts for bytes that are no character, or not yet one."""

# Bytes of the longest character, and so the most tokens that one can take.
_CHARACTER = 4
# Where so many new tokens ended in no whole character, some of their bytes never will, and the window is cut. What is left
# spans the three units (of up to three bytes) that are held back, and the rest of a unit that the cut may fall into.
_MOST_PENDING, _LEFT_PENDING = 16, 12


class TokenText:
    """Decodes token by token; the pieces make the whole text, and none ends inside a character.

    The last tokens before the new ones are decoded again with them, since a decoder may treat the beginning of a text on its
    own (a leading space). `DecodeStream` of the tokenizers library works alike, but raises where a decoder changes its mind:
    byte fallback reads a run of bytes as a whole, so that one bad byte turns the good characters before it into bad ones. Here
    what was said stays said.

    Args:
        tokenizer: decodes.
        context: tokens before the first one, whose text is not repeated.
        skip_special_tokens: special tokens give no text.
        shown: special tokens that give their text all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special_tokens else frozenset[int]()
        self._ids = self._window([token for token in context if token not in self._hidden])
        self._num_context = len(self._ids)
        self._said = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        if token_id in self._hidden or not self._tokenizer.knows(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # Byte fallback shows an unfinished character as one replacement for each byte, byte-level BPE as one in all.
        num_held = min(len(text) - len(text.rstrip(REPLACEMENT)), _CHARACTER - 1)
        if num_held == 0:
            return self._say_all(text)
        if len(self._ids) - self._num_context > _MOST_PENDING:
            return self._cut(text, num_held)
        return self._say_start(text[:-num_held])

    def finish(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        return self._say_all(self._decode(self._ids)) if len(self._ids) > self._num_context else ""

    def _window(self, context: Sequence[int]) -> list[int]:
        """The last tokens of the context, begun between two characters where that can be: byte fallback needs it."""
        windows = [list(context[-length:]) for length in range(_CHARACTER, 2 * _CHARACTER)]
        return next((ids for ids in windows if REPLACEMENT not in self._decode(ids)), windows[0])

    def _say_start(self, whole: str) -> str:
        """The rest of `whole`, the certain part of the decoded window, which stays where it is."""
        if not whole.startswith(self._said):
            return ""
        piece = whole[len(self._said) :]
        self._said = whole
        return piece

    def _say_all(self, text: str) -> str:
        """The rest of `text`, the decoded window, which nothing later can change; the window moves on."""
        piece = self._rest(text)
        if piece:
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._said = self._decode(self._ids)
        return piece

    def _cut(self, text: str, num_held: int) -> str:
        """The rest of `text` but its last `num_held` replacements; the window keeps the tokens at its end alone."""
        rest = self._rest(text)
        self._ids = self._ids[-_LEFT_PENDING:]
        window = self._decode(self._ids)
        if not window.endswith(REPLACEMENT * num_held):  # byte fallback finds good characters now that a bad byte is gone
            num_held = 0
        self._num_context = len(self._ids) - num_held
        self._said = window[: len(window) - num_held]
        return rest[: len(rest) - num_held]

    def _rest(self, text: str) -> str:
        """What of `text`, the decoded window, was not said."""
        if text.startswith(self._said):
            return text[len(self._said) :]
        for num_open in range(1, _CHARACTER):  # the context ended inside a character, which is whole now
            said = self._said.removesuffix(REPLACEMENT * num_open)
            if said != self._said and text.startswith(said):
                return text[len(said) :]
        return self._decode(self._ids[self._num_context :])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class StopMatcher:
    """Finds the first stop text in a text that comes in pieces, wherever the pieces are cut.

    The stop text that is complete first wins; of two that are complete at the same character, the longer one.

    Args:
        stops: the stop texts.
        keep: whether the stop text stays in the text.

    Attributes:
        found: the stop text that was met; None while there is none.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self.found: str | None = None
        self._stops = stops
        self._keep = keep
        self._tail = ""  # may be the beginning of a stop text

    def push(self, piece: str, *, active: bool = True) -> str:
        """What can be shown now that `piece` has come; nothing more once a stop text was found.

        Args:
            piece: the next text.
            active: whether a stop text that ends in this piece counts.
        """
        if self.found is not None:
            return ""
        text, shown = self._tail + piece, len(self._tail) if self._keep else 0
        matches = [match for stop in self._stops if (match := self._find(stop, text))] if active else []
        if matches:
            end, start, self.found = min(matches)
            self._tail = ""
            return text[shown : end if self._keep else start]
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._tail = text[len(text) - held :]
        return text[shown:] if self._keep else text[: len(text) - held]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        tail, self._tail = self._tail, ""
        return "" if self._keep else tail

    def _find(self, stop: str, text: str) -> tuple[int, int, str] | None:
        """End, start and text of the first `stop` that does not end within the tail, which was searched before."""
        start = text.find(stop, max(0, len(self._tail) - len(stop) + 1))
        return None if start < 0 else (start + len(stop), start, stop)

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` goes on from."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class TextEvent:
    """News about one answer, in text. The last one of an answer has a `finish_reason`.

    Attributes:
        request_id: the engine's request behind the answer.
        index: which of a prompt's `n` answers.
        text: the text that became certain; may be empty.
        token_ids: the new tokens, the one that ended the answer included.
        logprobs: one for each new token, where asked for; else empty.
        prompt_logprobs: with the first token, where asked for: one for each prompt token but the first.
        num_cached_tokens: prompt tokens that the prefix cache supplied.
        finish_reason: why the answer ended; None while it goes on.
        stop_reason: the stop text, or the id of the token, that ended it; None where neither did.
        failure: why it ended with "abort" where a grammar could not be kept.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    failure: str = ""


class Detokenizer:
    """Turns the token events of one request into text events, up to the first stop text.

    When an event comes out with a `finish_reason` that the token event did not have, a stop text was found; the engine still
    works on the request then, and has to abort it.

    Args:
        tokenizer: decodes.
        request: what the engine was asked.
        index: which of its prompt's answers it is.
        shown: special tokens that give their text even where `skip_special_tokens` hides the others.

    Attributes:
        num_characters: length of the text of all tokens so far, also of what is held back or cut off by a stop text.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, index: int = 0, *, shown: frozenset[int] = frozenset()) -> None:
        params = request.params
        self._request = request
        self._index = index
        self._num_tokens = 0
        self.num_characters = 0
        self._text = TokenText(tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens, shown=shown)
        self._stops = StopMatcher(params.stop, keep=params.include_stop_str_in_output)

    def take(self, event: TokenEvent) -> TextEvent:
        """The text event of a token event."""
        params = self._request.params
        piece = ""
        if event.token_id is not None:
            self._num_tokens += 1
            if event.stop_token_id is None or params.include_stop_str_in_output:
                piece = self._text.push(event.token_id)
        is_last = event.finish_reason is not None
        piece += self._text.finish() if is_last else ""
        self.num_characters += len(piece)
        text = self._stops.push(piece, active=self._num_tokens > params.min_tokens)
        text += self._stops.finish() if is_last else ""
        found = self._stops.found
        return TextEvent(
            request_id=event.request_id,
            index=self._index,
            text=text,
            token_ids=() if event.token_id is None else (event.token_id,),
            logprobs=() if event.logprobs is None else (event.logprobs,),
            prompt_logprobs=event.prompt_logprobs,
            num_cached_tokens=event.num_cached_tokens,
            finish_reason=event.finish_reason if found is None else "stop",
            stop_reason=event.stop_token_id if found is None else found,
            failure=event.failure if found is None else "",
        )
