"""`eightfold diff`: two checkpoints, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eightfold.cli.output import line, progress_bars, write
from eightfold.hub.names import identify

if TYPE_CHECKING:
    from eightfold.comparison import TensorComparison

DIFFERENT = 1
_HEADER = ("shape", "A", "B", "SQNR dB", "largest", "outcome", "tensor")
_WIDTHS = (16, 6, 6, 8, 9, 13, 0)
_HELP = "A folder, a hub id, or an alias."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_HELP)],
    b: Annotated[str, typer.Argument(metavar="B", help=_HELP)],
    show_all: Annotated[bool, typer.Option("--all", help="List tensors with the same bits too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with every tensor.")] = False,
) -> None:
    """Compare two checkpoints tensor by tensor, in any dialects. Exits with 0 where values are equal, 1 where not, 2 on errors.

    SQNR is A's signal over the difference. Listed are the tensors that have not the same bits.
    """
    for name in (a, b):
        identify(name)  # a wrong name is refused before anything heavy is imported
    from eightfold.comparison import EQUAL, compare, worst_different
    from eightfold.hub.resolve import resolve_model

    with progress_bars() as report:
        folders = [resolve_model(name, report=report) for name in (a, b)]
    found: list[TensorComparison] = []
    for item in compare(*folders):
        if not as_json and (show_all or item.outcome != "same bits"):
            if not any(show_all or earlier.outcome != "same bits" for earlier in found):
                write(line(_HEADER, _WIDTHS, right=(3, 4)))
            write(line(_row(item), _WIDTHS, right=(3, 4)))
        found.append(item)
    counts = Counter(item.outcome for item in found)
    equal = EQUAL.issuperset(counts)
    worst = worst_different(found)
    if as_json:
        tensors = [_record(item) for item in found]
        write(json.dumps({"a": a, "b": b, "equal": equal, "counts": counts, "tensors": tensors}))
    else:
        listed = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        write(f"{len(found)} tensors: {listed}")
        if worst is not None:
            write(f"most different: {worst.name}, {worst.sqnr_db:.2f} dB")
        write("equal" if equal else "different")
    if not equal:
        raise typer.Exit(DIFFERENT)


def _row(item: TensorComparison) -> tuple[str, ...]:
    shapes = list(dict.fromkeys(" x ".join(map(str, shape)) for shape in item.shapes if shape is not None))
    sqnr, largest = item.sqnr_db, item.max_difference
    return (
        " / ".join(shapes),
        item.forms[0] or "-",
        item.forms[1] or "-",
        "" if sqnr is None else "exact" if sqnr == math.inf else f"{sqnr:.2f}",
        "" if largest is None else f"{largest:.2e}",
        item.outcome,
        item.name,
    )


def _record(item: TensorComparison) -> dict[str, Any]:
    """For JSON, which has no word for what is not finite."""
    return {
        "name": item.name,
        "outcome": item.outcome,
        "forms": item.forms,
        "shapes": item.shapes,
        "sqnr_db": _finite(item.sqnr_db),
        "max_difference": _finite(item.max_difference),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
