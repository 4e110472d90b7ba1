"""What the commands print with: text tables on stdout, progress bars on stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from eightfold.types import Progress

_PHASES: Mapping[str, str] = MappingProxyType(
    {
        "download": "Downloading",
        "convert": "Converting",
        "load": "Loading",
        "quantize": "Quantizing",
        "measure": "Measuring layers",
    }
)


def admit_any_text() -> None:
    """Have the standard streams take what they cannot encode or decode as escapes, rather than end the program."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def write(text: str = "", *, end: str = "\n") -> None:
    """Print to stdout at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print one line to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows as aligned columns; the columns in `right` are numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(line(row, widths, right=right) for row in rows)


def line(row: Sequence[str], widths: Sequence[int], *, right: Sequence[int] = ()) -> str:
    """One row in columns of these widths."""
    cells = [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def megabytes(count: int | None) -> str:
    """Bytes for people; a dash where they are not known."""
    return "-" if count is None else f"{count / 1e6:,.1f} MB"


@contextmanager
def progress_bars() -> Iterator[Progress | None]:
    """A callback that draws a bar for each phase on stderr; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(_PHASES.get(phase, phase))
            bars.update(tasks[phase], completed=done, total=total or None)

        yield report
