"""Tables on stdout, progress bars on a terminal's stderr."""

from __future__ import annotations

import io
import sys

import pytest

from eightfold.cli.output import admit_any_text, complain, megabytes, progress_bars, table, write


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_aligns_text_left_and_numbers_right() -> None:
    assert table([("name", "n"), ("a", "100"), ("long name", "7")], right=[1]) == (
        "name         n\na          100\nlong name    7"
    )


def test_bytes_are_shown_in_megabytes() -> None:
    assert (megabytes(1_234_500_000), megabytes(0), megabytes(None)) == ("1,234.5 MB", "0.0 MB", "-")


def test_answers_and_complaints_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    write("an answer", end="")
    complain("a complaint")
    assert capsys.readouterr() == ("an answer", "a complaint\n")


def test_no_text_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\nb\n"), encoding="utf-8"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    admit_any_text()
    assert [input(), input()] == ["a\udcff", "b"]
    write("4 €")
    assert raw.getvalue() == rb"4 \u20ac" + b"\n"


def test_no_bar_is_drawn_where_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bars() as report:
        assert report is None


def test_a_terminal_gets_a_bar_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bars() as report:
        assert report is not None
        report("download", 0, 0)
        report("load", 1, 4)
        report("load", 4, 4)
    assert "Downloading" in terminal.getvalue()
    assert "Loading" in terminal.getvalue()
