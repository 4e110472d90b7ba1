"""The shape of every report."""

from __future__ import annotations

import json

import pytest

from eightfold._version import __version__
from eightfold.benchmarks.report import environment, print_report


def test_the_environment_names_hardware_versions_and_commit() -> None:
    found = environment()
    assert found["eightfold"] == __version__
    assert found["hardware"]
    assert isinstance(found["threads"], int)
    assert {"torch", "python", "commit"} <= found.keys()


def test_a_table_and_one_json_line_last(capsys: pytest.CaptureFixture[str]) -> None:
    print_report("a title", ["name", "value"], [["first", "1.0"], ["a longer one", "12.5"]], {"rows": {"first": 1.0}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a title"
    assert lines[-4:-1] == ["name          value", "first           1.0", "a longer one   12.5"]
    last = json.loads(lines[-1])
    assert (last["benchmark"], last["rows"]) == ("a title", {"first": 1.0})
    assert last["hardware"] == environment()["hardware"]
