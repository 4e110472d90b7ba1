"""Where the text comes from, and what is said where it cannot come."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from eightfold.benchmarks.text import FOLDER, state_of_the_union
from eightfold.errors import InputError

UNREACHABLE = """npm error code ENOTFOUND
npm error network request to the registry failed, reason: getaddrinfo ENOTFOUND
npm error network In most cases you are behind a proxy or have bad network settings.
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EIGHTFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pack(cwd: Path) -> None:
    with tarfile.open(cwd / "datasets.tgz", "w:gz") as archive:
        for name in ("1991_bush_r", "2012_obama_d", "1790_washington_n"):
            content = f"<{name}>".encode()
            info = tarfile.TarInfo(f"{FOLDER}{name}.txt")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def test_the_chosen_years_are_joined_in_their_order_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def npm(command: list[str], *, cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        pack(cwd)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", npm)
    assert state_of_the_union() == "<2012_obama_d><1991_bush_r>"
    assert state_of_the_union() == "<2012_obama_d><1991_bush_r>"
    assert len(calls) == 1


def test_without_npm_the_error_names_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def npm(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("npm")

    monkeypatch.setattr(subprocess, "run", npm)
    with pytest.raises(InputError, match="no npm to fetch it with; expected npm, or --text FILE"):
        state_of_the_union()


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("npm error code E404\nnpm error 404 Not Found\n", r"\(npm error code E404\)"),
        (UNREACHABLE, r"\(getaddrinfo ENOTFOUND\)"),
    ],
)
def test_a_failing_npm_is_quoted_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, empty_cache: Path, stderr: str, reason: str
) -> None:
    failed = subprocess.CompletedProcess(["npm"], 1, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(InputError, match=reason):
        state_of_the_union()
    assert not list(empty_cache.glob("*.txt"))
