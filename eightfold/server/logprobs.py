"""Log probabilities in OpenAI's two shapes: the arrays of completions, and the list of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eightfold.detokenizer import TokenText
from eightfold.text import Tokenizer
from eightfold.types import TokenLogprobs

LOWEST = -9999.0
"""What OpenAI tells for a probability that is zero, whose logarithm JSON cannot hold."""


def token_text(token: bytes) -> str:
    """A token as OpenAI shows it: its text, or its bytes where they are no whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], offsets: Sequence[int], *, start: int = 0
) -> dict[str, list[Any]]:
    """The `logprobs` of a completion's choice.

    Args:
        tokenizer: knows the tokens.
        logprobs: of tokens in a row.
        offsets: where in the answer's text each of them begins.
        start: where the answer's text begins in the text of the choice.
    """
    return {
        "tokens": [token_text(tokenizer.token_bytes(item.token_id)) for item in logprobs],
        "token_logprobs": [max(item.logprob, LOWEST) for item in logprobs],
        "top_logprobs": [_top(tokenizer, item) for item in logprobs],
        "text_offset": [start + offset for offset in offsets],
    }


def prompt_logprobs(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
    """The same of a prompt that is told before its answer. Nothing comes before its first token, which has none.

    Args:
        tokenizer: knows the tokens.
        token_ids: the prompt.
        logprobs: of all its tokens but the first.
    """
    offsets, length, text = [], 0, TokenText(tokenizer)
    for token_id in token_ids:
        offsets.append(length)
        length += len(text.push(token_id))
    shown = completion_logprobs(tokenizer, logprobs, offsets[1:])
    first = {
        "tokens": token_text(tokenizer.token_bytes(token_ids[0])),
        "token_logprobs": None,
        "top_logprobs": None,
        "text_offset": 0,
    }
    return {name: [first[name], *values] for name, values in shown.items()}


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Parts of a completion's `logprobs`, put together."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The `content` of the `logprobs` of a chat's choice.

    Args:
        tokenizer: knows the tokens.
        logprobs: of tokens in a row.
        num_top: how many of the likeliest tokens to list.
    """
    return [
        {
            **_entry(tokenizer, item.token_id, item.logprob),
            "top_logprobs": [_entry(tokenizer, token_id, logprob) for token_id, logprob in item.top[:num_top]],
        }
        for item in logprobs
    ]


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": token_text(token), "logprob": max(logprob, LOWEST), "bytes": list(token)}


def _top(tokenizer: Tokenizer, item: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens; the one that stands there is among them, whatever its rank, as OpenAI has it."""
    pairs = [*item.top, (item.token_id, item.logprob)]
    return {token_text(tokenizer.token_bytes(token_id)): max(logprob, LOWEST) for token_id, logprob in reversed(pairs)}
