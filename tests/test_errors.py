"""The one shape of a refusal."""

from __future__ import annotations

import pytest

from eightfold.errors import BackendError, CheckpointError, InputError


def test_a_refusal_says_what_got_and_expected() -> None:
    error = InputError("top_p", got=1.5, expected="at most 1")
    assert str(error) == "top_p: got 1.5; expected at most 1"
    assert (error.what, error.got, error.expected, error.remedy) == ("top_p", 1.5, "at most 1", "")


def test_a_remedy_is_a_sentence_of_its_own() -> None:
    assert str(InputError("x", got=1, expected="2", remedy="Say 2.")) == "x: got 1; expected 2. Say 2."


def test_a_long_value_is_shortened() -> None:
    message = str(InputError("prompt", got="a" * 1000, expected="less"))
    assert len(message) < 300
    assert "aaa..." in message


@pytest.mark.parametrize("kind", [CheckpointError, BackendError])
def test_every_refusal_is_an_input_error_and_a_value_error(kind: type[InputError]) -> None:
    assert issubclass(kind, InputError)
    assert issubclass(kind, ValueError)
