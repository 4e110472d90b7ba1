"""Typed reading of a Hugging Face configuration. What cannot be used is refused by the name of its key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from eightfold.errors import CheckpointError


class ConfigReader:
    """The keys of one JSON object.

    A missing key takes the default; where there is none, it is refused. Types are JSON's: true is no number, and 1 is not true.

    Args:
        values: the object.
        name: what the object is called in errors, such as "rope_scaling"; empty for the whole configuration.
    """

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self.values = values
        self.name = name

    def refuse(self, key: str, expected: str, *, got: str = "", remedy: str = "") -> NoReturn:
        """Raise CheckpointError about a key; what was got is its value where nothing else is said."""
        what = f"{self.name}.{key}" if self.name else key
        shown = got or (repr(self.values[key]) if key in self.values else "nothing")
        raise CheckpointError(what, got=shown, expected=expected, remedy=remedy)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.refuse(key, f"a whole number, at least {minimum}")
        return value

    def integer_or_none(self, key: str, default: int | None, *, minimum: int = 1) -> int | None:
        """A whole number of at least `minimum`, or null."""
        return None if self.values.get(key, default) is None else self.integer(key, default, minimum=minimum)

    def number(self, key: str, default: float | None = None, *, minimum: float | None = None) -> float:
        """A finite number: of at least `minimum`, or positive where none is given."""
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 < value < float("inf") if minimum is None else minimum <= value < float("inf")):
            self.refuse(key, "a positive number" if minimum is None else f"a number, at least {minimum:g}")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """A positive number, or null or nothing."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def choice(self, key: str, choices: Iterable[str], default: str | None = None, *, remedy: str = "") -> str:
        """One of `choices`. A value near to one of them is asked about."""
        known = list(choices)
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in known:
            near = get_close_matches(str(value), known, n=1)
            self.refuse(key, f"one of: {', '.join(known)}", remedy=f"Did you mean {near[0]}?" if near else remedy)
        return value

    def spelling(self, *keys: str) -> str:
        """The one of several keys for the same thing that has a value; the first where none has. Two must have the same one."""
        given = [key for key in keys if self.values.get(key) is not None]
        for other in given[1:]:
            if self.values[other] != self.values[given[0]]:
                self.refuse(other, f"{self.values[given[0]]!r}, as {given[0]} says, or one of the two keys alone")
        return given[0] if given else keys[0]

    def items(self, key: str) -> list[Any] | None:
        """A list, or None for null or nothing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, list | tuple):
            self.refuse(key, "a list")
        return None if value is None else list(value)

    def section(self, key: str) -> dict[str, Any]:
        """A JSON object without its nulls; an empty one for null or nothing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(key, "a JSON object")
        return {} if value is None else {name: item for name, item in value.items() if item is not None}
