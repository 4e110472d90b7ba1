"""Where in an answer a grammar begins: after a text such as "</think>", however that is cut into tokens.

Some models choose whether they think. Then the answer is held to its grammar from the first token on, with one more way to
begin: a text such as "<think>", which frees the answer until the text that ends its reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eightfold.text import Tokenizer

# What models write between their reasoning and their answer, as one token.
_BREAKS = (b"\n", b"\n\n", b" ")


class Beginning:
    """Finds a tag in the tokens of answers.

    Until it was met, no end token may come, and no token that ends the tag and goes on with a text that the grammar would
    miss. After it line breaks may come.

    Args:
        tag: the text.
        tokenizer: the model's.
        vocab_size: width of its logits.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tag: str, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tag = tag.encode()
        self._token_bytes = tokenizer.token_bytes
        spelled = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        usable = np.array([bool(text) for text in spelled])
        usable[[token_id for token_id in eos_token_ids if token_id < vocab_size]] = False
        breaks = np.array([text in _BREAKS for text in spelled])
        self._breaks = np.packbits(breaks, bitorder="little")
        self._break_ids = frozenset(np.flatnonzero(breaks).tolist())
        ending = [(token_id, text) for token_id, text in enumerate(spelled) if self._tag[-1:] in text]
        # By how much of the tag has come: the tokens that may follow.
        self._allowed: list[np.ndarray] = []
        for num_met in range(len(self._tag)):
            allowed = usable.copy()
            rest = self._tag[num_met:]
            for token_id, text in ending:
                after = _after(text, self._tag, rest)
                if after is not None and after.strip():
                    allowed[token_id] = False
            self._allowed.append(np.packbits(allowed, bitorder="little"))

    def mask(self, tail: bytes) -> bytes:
        """Which tokens may follow an answer in which the tag was not met.

        Args:
            tail: what `advance` gave.
        """
        mask = self._allowed[0]
        for num_met in range(1, len(tail) + 1):
            if tail.endswith(self._tag[:num_met]):
                mask = mask & self._allowed[num_met]
        return mask.tobytes()

    def advance(self, tail: bytes, token_id: int) -> tuple[bytes, bool]:
        """The end of an answer's text after a token, as far as the tag may have begun in it, and whether the tag was met."""
        text = tail + self._token_bytes(token_id)
        if self._tag in text:
            return b"", True
        return text[len(text) - min(len(text), len(self._tag) - 1) :], False

    def with_breaks(self, mask: bytes) -> bytes:
        """A grammar's mask, and the line breaks that may stand before what it describes."""
        joined = np.frombuffer(mask, dtype=np.uint8).copy()
        size = min(len(joined), len(self._breaks))
        joined[:size] |= self._breaks[:size]
        return joined.tobytes()

    def is_break(self, token_id: int) -> bool:
        """Whether a token is such a line break."""
        return token_id in self._break_ids


class Opening:
    """Finds a tag at the beginning of answers.

    Args:
        tag: the text.
        end: the text after which the grammar begins, which does not stand in one token with the end of `tag`.
        tokenizer: the model's.
        vocab_size: width of its logits.
        eos_token_ids: tokens that end an answer.
    """

    def __init__(self, tag: str, end: str, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tag = tag.encode()
        self._token_bytes = tokenizer.token_bytes
        leading = np.zeros((len(self._tag), vocab_size), dtype=np.bool_)
        for token_id in range(vocab_size):
            text = tokenizer.token_bytes(token_id)
            if token_id in eos_token_ids or not text.strip() or end.encode() in text:
                continue
            for num_met in range(len(self._tag)):
                leading[num_met, token_id] = self._met_with(num_met, text) is not None
        self._leading = np.packbits(leading, axis=1, bitorder="little")

    def joined(self, mask: bytes, num_met: int) -> bytes:
        """A mask, and the tokens that lead on to the whole tag.

        Args:
            mask: what else may follow.
            num_met: bytes of the tag that have come.
        """
        joined = np.frombuffer(mask, dtype=np.uint8).copy()
        size = min(len(joined), self._leading.shape[1])
        joined[:size] |= self._leading[num_met, :size]
        return joined.tobytes()

    def advance(self, num_met: int, token_id: int) -> int | None:
        """How many bytes of the tag have come with a token, all of them where it is whole; None where it is not the tag."""
        return self._met_with(num_met, self._token_bytes(token_id))

    def is_whole(self, num_met: int) -> bool:
        """Whether so many bytes are the tag."""
        return num_met == len(self._tag)

    def _met_with(self, num_met: int, text: bytes) -> int | None:
        """The bytes of the tag that have come with a text; before the tag there may be whitespace."""
        own, rest = text if num_met else text.lstrip(), self._tag[num_met:]
        if own.startswith(rest):
            return len(self._tag)
        return num_met + len(own) if text and rest.startswith(own) else None


def _after(text: bytes, tag: bytes, rest: bytes) -> bytes | None:
    """What a token's text has behind the tag, of which `rest` was still to come; None where it does not end the tag."""
    if text.startswith(rest):
        return text[len(rest) :]
    at = text.find(tag)
    return None if at < 0 else text[at + len(tag) :]
