"""Typed reading of a configuration: defaults, and refusals that say what, got, expected and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eightfold.errors import CheckpointError
from eightfold.models.hf_config import ConfigReader

READER = ConfigReader(
    {
        "whole": 7,
        "zero": 0,
        "fraction": 0.5,
        "yes": True,
        "word": "one",
        "null": None,
        "list": [1, 2],
        "object": {"a": 1, "b": None},
        "infinite": float("inf"),
        "nan": float("nan"),
    }
)


def test_values_and_defaults() -> None:
    assert READER.integer("whole") == 7
    assert READER.integer("absent", 3) == 3
    assert READER.integer("zero", minimum=0) == 0
    assert READER.integer_or_none("null", 3) is None
    assert READER.integer_or_none("absent", None) is None
    assert READER.integer_or_none("absent", 3) == 3
    assert READER.number("whole") == 7.0
    assert READER.number("fraction", minimum=0.5) == 0.5
    assert READER.number_or_none("null") is None
    assert READER.flag("yes", False) is True
    assert READER.flag("absent", False) is False
    assert READER.choice("word", ("one", "two")) == "one"
    assert READER.choice("absent", ("one", "two"), "two") == "two"
    assert READER.items("list") == [1, 2]
    assert READER.items("null") is None
    assert READER.section("object") == {"a": 1}
    assert READER.section("absent") == {}


REFUSALS: list[tuple[Callable[[ConfigReader], Any], str]] = [
    (lambda r: r.integer("absent"), "absent: got nothing; expected a whole number, at least 1"),
    (lambda r: r.integer("null", 3), "null: got None; expected a whole number, at least 1"),
    (lambda r: r.integer("zero"), "zero: got 0; expected a whole number, at least 1"),
    (lambda r: r.integer("yes"), "yes: got True; expected a whole number, at least 1"),
    (lambda r: r.integer("fraction"), "fraction: got 0.5; expected a whole number, at least 1"),
    (lambda r: r.integer_or_none("word", None), "word: got 'one'; expected a whole number, at least 1"),
    (lambda r: r.number("zero"), "zero: got 0; expected a positive number"),
    (lambda r: r.number("nan"), "nan: got nan; expected a positive number"),
    (lambda r: r.number("infinite"), "infinite: got inf; expected a positive number"),
    (lambda r: r.number("yes"), "yes: got True; expected a positive number"),
    (lambda r: r.number("fraction", minimum=1), "fraction: got 0.5; expected a number, at least 1"),
    (lambda r: r.number("absent"), "absent: got nothing; expected a positive number"),
    (lambda r: r.flag("whole", False), "whole: got 7; expected true or false"),
    (lambda r: r.flag("null", False), "null: got None; expected true or false"),
    (lambda r: r.choice("word", ("ones", "two")), "word: got 'one'; expected one of: ones, two. Did you mean ones?"),
    (lambda r: r.choice("list", ("x", "y")), "list: got [1, 2]; expected one of: x, y"),
    (lambda r: r.choice("absent", ("x",), remedy="Do it."), "absent: got nothing; expected one of: x. Do it."),
    (lambda r: r.items("word"), "word: got 'one'; expected a list"),
    (lambda r: r.section("list"), "list: got [1, 2]; expected a JSON object"),
    (lambda r: ConfigReader(r.section("object"), "object").flag("a", True), "object.a: got 1; expected true or false"),
]


@pytest.mark.parametrize(("read", "message"), REFUSALS, ids=[message.partition(";")[0] for _, message in REFUSALS])
def test_refusals(read: Callable[[ConfigReader], Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(READER)
    assert str(caught.value) == message


def test_one_thing_under_several_keys() -> None:
    assert READER.spelling("whole", "missing") == "whole"
    assert READER.spelling("missing", "whole") == "whole"
    assert READER.spelling("null", "missing") == "null"
    assert ConfigReader({"a": 3, "b": 3}).spelling("a", "b") == "a"
    with pytest.raises(CheckpointError, match=r"^b: got 4; expected 3, as a says, or one of the two keys alone$"):
        ConfigReader({"a": 3, "b": 4}).spelling("a", "b")
