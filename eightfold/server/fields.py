"""What all fields of bodies have in common: how an error shows a value or refuses a name, and what is tolerated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from eightfold.errors import InputError

_MOST_SHOWN = 80
_TIERS = ("auto", "default", "flex", "scale", "priority")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


TOLERATED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "user": (_is_text, "a text"),
    "metadata": (
        lambda value: isinstance(value, Mapping) and all(map(_is_text, value.values())),
        "an object whose values are texts",
    ),
    "store": (lambda value: isinstance(value, bool), "true or false"),
    "service_tier": (lambda value: value in _TIERS, f"one of {', '.join(_TIERS)}"),
    "safety_identifier": (_is_text, "a text"),
    "prompt_cache_key": (_is_text, "a text"),
}
"""Top-level fields that cannot change an answer, each with what it may hold. Nothing is done with them."""


def shown(value: object) -> str:
    """A value in an error, shortened where it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def same(value: object, other: object) -> bool:
    """Equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def check_tolerated(name: str, value: object) -> None:
    """Refuse a value that a field without effect cannot have; null is a field that is left out.

    Raises:
        InputError: naming the field.
    """
    check, expected = TOLERATED[name]
    if value is not None and not check(value):
        raise InputError(name, got=shown(value), expected=expected)


def refuse_unknown(given: Mapping[str, Any], known: Iterable[str], path: str) -> None:
    """Refuse the first name of an object that is not known.

    Args:
        given: the object.
        known: the names that it may have.
        path: of the object in the body; empty for the body.

    Raises:
        InputError: `what` is the name's path.
    """
    names = sorted(known)
    for name in given:
        if name not in names:
            raise unknown(name, names, path)


def unknown(name: str, known: Iterable[str], path: str) -> InputError:
    """The refusal of a name that is not known, with the nearest one that is."""
    names, prefix = sorted(known), f"{path}." if path else ""
    near = get_close_matches(name, names, n=1)
    expected = f"one of {', '.join(names)}" if names else "no fields"
    if near:
        expected = f"{prefix}{near[0]}, the nearest known field"
    return InputError(f"{prefix}{name}", got="a field that is unknown", expected=expected)
