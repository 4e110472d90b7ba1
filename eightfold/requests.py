"""How a request comes about: its checks, its seed, and the `n` answers that a prompt was asked for. No text here.

Whoever takes a prompt in (the engine in this process, or a server in another) makes its requests here, so that a prompt is
refused alike everywhere and a seed gives the same answers everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eightfold.errors import InputError
from eightfold.types import Request, SamplingParams


class PromptTooLongError(InputError):
    """A prompt that leaves no room for a token of an answer."""


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    context_length: int,
    vocab_size: int,
    sampling_defaults: Mapping[str, Any],
    seed: int,
) -> Request:
    """A request with every sampling value and the seed decided.

    Args:
        request_id: names it; not in use.
        prompt_token_ids: the prompt.
        params: what was asked.
        context_length: most tokens of prompt and answer together.
        vocab_size: token ids lie below it.
        sampling_defaults: values for what `params` leaves open, by name.
        seed: where `params` has none.

    Raises:
        PromptTooLongError: a prompt that fills the context.
        InputError: an empty prompt, token ids outside the vocabulary.
    """
    if not prompt_token_ids:
        raise InputError("prompt", got="no tokens", expected="at least one token")
    limit = context_length - 1
    if len(prompt_token_ids) > limit:
        raise PromptTooLongError(
            "prompt",
            got=f"{len(prompt_token_ids)} tokens",
            expected=f"at most {limit}, which leaves one for the answer within context_length {context_length}",
        )
    for name, ids in (
        ("prompt token id", prompt_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise InputError(name, got=repr(token), expected=f"a whole number from 0 to {vocab_size - 1}")
    return Request(
        request_id,
        tuple(prompt_token_ids),
        params.resolved(sampling_defaults),
        seed if params.seed is None else params.seed,
    )


def params_of_answers(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of a prompt's `n` answers.

    The first has the seed as it is given, each other one a seed of its own derived from it. The first alone tells the log
    probabilities of the prompt, which are the same for all.
    """
    others = range(1, params.n)
    return [params, *(replace(params, prompt_logprobs=None, seed=_derived(params.seed, index)) for index in others)]


def mixed_seed(seed: int, counter: int) -> int:
    """A seed for the `counter`th request that brings none, from the engine's own."""
    return _digest(f"{seed}:{counter}")


def _derived(seed: int | None, index: int) -> int | None:
    return None if seed is None else _digest(f"{seed}/{index}")  # without one, each request gets its own anyway


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
