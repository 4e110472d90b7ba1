"""The one shape of a refusal: what is wrong, what was given, what was expected, what would work."""

from __future__ import annotations


class InputError(ValueError):
    """A value from a user, a configuration or a checkpoint that cannot be used.

    Args:
        what: the name of the thing: a parameter, a flag, a file, a tensor.
        got: the value as it was given, shortened where it is long.
        expected: what would have been accepted.
        remedy: what the reader can do about it; empty where `expected` already says so.
    """

    def __init__(self, what: str, *, got: object, expected: str, remedy: str = "") -> None:
        self.what = what
        self.got = got
        self.expected = expected
        self.remedy = remedy
        shown = str(got)
        if len(shown) > 200:
            shown = shown[:200] + "..."
        text = f"{what}: got {shown}; expected {expected}"
        super().__init__(f"{text}. {remedy}" if remedy else text)


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged, or of a kind that is not supported."""


class BackendError(InputError):
    """No backend, or not the one that was named, can run an operation on this machine."""
