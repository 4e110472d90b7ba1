"""The command before it serves; tests/server/test_launch.py has the rest of its life."""

from __future__ import annotations

import importlib.util

import pytest

from eightfold.cli import main
from eightfold.cli.serve import require_libraries
from eightfold.errors import InputError


def test_a_missing_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("zmq", "uvloop") else find(name))
    with pytest.raises(InputError, match=r"got no uvloop, zmq; .* pip install 'eightfold\[server\]'"):
        require_libraries()


@pytest.mark.parametrize(
    ("words", "named"),
    [(["./nothing"], "./nothing"), (["smollm2", "--port", "70000"], "port: got 70000")],
    ids=["model", "port"],
)
def test_a_wrong_value_is_refused_before_anything_listens(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    out, error = capsys.readouterr()
    assert named in error
    assert "listening" not in out
