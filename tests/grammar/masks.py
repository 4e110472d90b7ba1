"""Walking through a constraint as a model without a will would."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import numpy as np

from eightfold.types import Constraint


def permitted(mask: bytes | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist()


def accepts(constraint: Constraint, token_ids: Sequence[int], eos_token_id: int) -> bool:
    """Whether an answer of exactly these tokens may be given."""
    for length, token_id in enumerate([*token_ids, eos_token_id]):
        if token_id not in permitted(constraint.mask(token_ids[:length])):
            return False
    return True


def random_walk(constraint: Constraint, eos_token_ids: Collection[int], seed: int, most: int = 500) -> list[int]:
    """Random permitted tokens up to an end token, which is left out; at most `most`."""
    generator, token_ids = random.Random(seed), list[int]()
    while len(token_ids) < most:
        choices = permitted(constraint.mask(token_ids))
        assert choices
        ends = [token_id for token_id in choices if token_id in eos_token_ids]
        if ends:
            return token_ids
        token_ids.append(generator.choice(choices))
    raise AssertionError(f"no end within {most} tokens")
