"""What all fields of bodies have in common."""

from __future__ import annotations

import pytest

from eightfold.errors import InputError
from eightfold.server.fields import TOLERATED, check_tolerated, refuse_unknown, same, shown, unknown


def test_values_are_shown_short() -> None:
    assert shown(None) == "nothing"
    assert shown({"a": 1}) == "{'a': 1}"
    assert len(shown("x" * 1000)) < 100


def test_true_is_not_one() -> None:
    assert same([1.0], [1])
    assert not same(True, 1)
    assert not same(0, False)


def test_unknown_names_are_refused_by_their_path() -> None:
    refuse_unknown({"a": 1, "b": None}, ("a", "b", "c"), "x")
    with pytest.raises(InputError) as caught:
        refuse_unknown({"a": 1, "nmae": 2}, ("a", "name"), "messages[3]")
    assert (
        str(caught.value) == "messages[3].nmae: got a field that is unknown; expected messages[3].name, the nearest known field"
    )
    assert str(unknown("q", ("b", "a"), "")) == "q: got a field that is unknown; expected one of a, b"
    assert str(unknown("q", (), "")) == "q: got a field that is unknown; expected no fields"


def test_fields_without_effect_are_checked_all_the_same() -> None:
    for name in TOLERATED:
        check_tolerated(name, None)
        with pytest.raises(InputError) as caught:
            check_tolerated(name, [1])
        assert caught.value.what == name
