"""`eightfold inspect`: what quantizing would do to each tensor of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eightfold.cli.flags import Given, takes_flags
from eightfold.cli.loading import config_to_measure
from eightfold.cli.output import line, megabytes, progress_bars, write
from eightfold.errors import CheckpointError
from eightfold.hub.names import identify

if TYPE_CHECKING:
    from eightfold.inspection import BackendUse, LayerInspection, TensorInspection
    from eightfold.serialization import SerializedReport

_FLAGS = (
    "revision",
    "quantization",
    "quantization_ignored_layers",
    "quantize_lm_head",
    "requantize",
    "scale_rule",
    "dtype",
    "device",
    "load_format",
    "fp8_gemm_backend",
    "moe_runner_backend",
    "attention_backend",
)
# Lines of the lists of what is worst.
_WORST = 10
_HEADER = ("tensor", "shape", "before", "after", "SQNR dB", "fold error", "backend", "kept because")
_WIDTHS = (0, 14, 12, 12, 7, 10, 10, 0)


@takes_flags(engine=_FLAGS, sampling=False, defaults={"quantization": "mxfp8"})
def inspect(given: Given, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Show what becomes of each tensor and expert: decision, bytes, noise, backend. The worst and totals come last.

    A checkpoint that is quantized already is shown as it is: dialect, coverage, scale rule, and all that contradicts its
    configuration.
    """
    # A wrong name is refused before anything heavy is imported.
    identify(given.config.model, given.config.revision, needs_weights=given.config.needs_weights)
    from eightfold.hub.resolve import resolve_model
    from eightfold.inspection import Inspection, by_layer, found_rule, worst_tensors
    from eightfold.serialization import report_serialized

    with progress_bars() as report:
        path = resolve_model(
            given.config.model, revision=given.config.revision, report=report, needs_weights=given.config.needs_weights
        )
    serialized = report_serialized(path) if given.config.needs_weights else None
    if serialized is not None and not as_json:
        _write_serialized(serialized)
    if serialized is not None and serialized.disagreements:
        if as_json:
            write(json.dumps({"model": given.config.model, "serialized": asdict(serialized)}))
        count = len(serialized.disagreements)
        raise CheckpointError(
            str(path), got=f"{count} {_plural('disagreement', count)}", expected=f"what {serialized.source} says"
        )
    inspection = Inspection(config_to_measure(given, path))
    widths = (max(len(name) for name in ("tensor", *inspection.names)), *_WIDTHS[1:])
    right = range(2, 6)
    if not as_json:
        write(line(_HEADER, widths, right=right))
    tensors: list[TensorInspection] = []
    for tensor in inspection.tensors():
        tensors.append(tensor)
        if not as_json:
            write(line(_row(tensor), widths, right=right))
    totals = _totals(tensors)
    if as_json:
        record = {
            "model": given.config.model,
            "tensors": [_record(tensor) for tensor in tensors],
            "layers": [asdict(layer) for layer in by_layer(tensors)],
            "notes": list(inspection.notes),
            "skipped": dict(inspection.skipped),
            "backends": [backend_record(use) for use in inspection.backends()],
            "totals": totals,
        }
        if serialized is not None:
            record["serialized"] = asdict(serialized) | {"rule": found_rule(tensors)}
        write(json.dumps(record))
        return
    _write_worst(worst_tensors(tensors, _WORST), by_layer(tensors)[:_WORST], widths)
    for note in inspection.notes:
        write(note)
    write(
        f"\n{totals['quantized']} tensors quantized, {totals['kept']} kept; "
        f"{megabytes(totals['bytes_before'])} become {megabytes(totals['bytes_after'])}"
    )
    if serialized is not None:
        write(f"scale rule, as the blocks show it: {found_rule(tensors)}")
    if totals["sqnr_db_mean"] is not None:
        write(
            f"SQNR {totals['sqnr_db_mean']:.2f} dB on average, {totals['sqnr_db_min']:.2f} at worst; "
            f"fold error {_fold_error(totals['fold_error_max'])} at worst"
        )
    for use in inspection.backends():
        write(describe(use))


def _write_serialized(report: SerializedReport) -> None:
    """What is in the files, and what contradicts the configuration."""
    write(f"dialect {report.dialect}, by {report.source}")
    forms = ", ".join(f"{count} {form}" for form, count in report.tensors.items())
    write(f"weights of layers: {forms}; {report.covered:.1%} of their elements are quantized")
    for pattern, count in report.excluded.items():
        what = f"{count} {_plural('tensor', count)}" if count else "nothing that is there and not excluded before"
        write(f"excluded by {pattern}: {what}")
    if report.kv_cache is not None:
        write(f"calibrated for keys and values in {report.kv_cache}, which have the activations' type here")
    for fault in report.disagreements:
        write(f"disagrees: {fault}")
    write("")


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _write_worst(tensors: Sequence[TensorInspection], layers: Sequence[LayerInspection], widths: Sequence[int]) -> None:
    """The worst tensors and the worst layers, where there are more than these."""
    if not tensors:
        return
    write(f"\nthe {len(tensors)} tensors with most noise, the worst first")
    for tensor in tensors:
        write(line(_row(tensor), widths, right=range(2, 6)))
    width = max(len(layer.layer) for layer in layers)
    write(f"\nthe {len(layers)} layers with most noise, the worst first: least and mean SQNR, largest fold error, worst tensor")
    for layer in layers:
        numbers = f"{layer.sqnr_db_min:6.2f}  {layer.sqnr_db_mean:6.2f}  {_fold_error(layer.fold_error_max):>8}"
        write(f"{layer.layer:<{width}}  {numbers}  {layer.worst}")
    write("")


def describe(use: BackendUse) -> str:
    """A backend, what it does, and why the better ones declined, for people."""
    declined = "".join(f"\n  {item.backend} declined: {item.reason}" for item in use.declined) or ", the first choice"
    return f"{use.operation}: {use.backend}, {use.count} {'layer' if use.count == 1 else 'layers'}{declined}"


def backend_record(use: BackendUse) -> dict[str, Any]:
    """The same for JSON."""
    declined = [{"backend": item.backend, "reason": item.reason} for item in use.declined]
    return {"operation": use.operation, "backend": use.backend, "layers": use.count, "declined": declined}


def _fold_error(error: float) -> str:
    return f"{error:.1e}" if error else "exact"


def _row(tensor: TensorInspection) -> Sequence[str]:
    return (
        tensor.name,
        " x ".join(map(str, tensor.shape)),
        f"{tensor.bytes_before:,}",
        f"{tensor.bytes_after:,}",
        "" if tensor.sqnr_db is None else "exact" if math.isinf(tensor.sqnr_db) else f"{tensor.sqnr_db:.2f}",
        "" if tensor.fold_error is None else _fold_error(tensor.fold_error),
        tensor.backend or "",
        tensor.decision.reason,
    )


def _record(tensor: TensorInspection) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "quantized": tensor.decision.quantized,
        "reason": tensor.decision.reason,
        "bytes_before": tensor.bytes_before,
        "bytes_after": tensor.bytes_after,
        "sqnr_db": tensor.sqnr_db if tensor.sqnr_db is None or math.isfinite(tensor.sqnr_db) else None,
        "fold_error": tensor.fold_error,
        "backend": tensor.backend,
        "declined": [{"backend": item.backend, "reason": item.reason} for item in tensor.declined],
    }


def _totals(tensors: Sequence[TensorInspection]) -> dict[str, Any]:
    quantized = [tensor for tensor in tensors if tensor.decision.quantized]
    noise = [tensor.sqnr_db for tensor in quantized if tensor.sqnr_db is not None and math.isfinite(tensor.sqnr_db)]
    return {
        "quantized": len(quantized),
        "kept": len(tensors) - len(quantized),
        "bytes_before": sum(tensor.bytes_before for tensor in tensors),
        "bytes_after": sum(tensor.bytes_after for tensor in tensors),
        "sqnr_db_mean": sum(noise) / len(noise) if noise else None,
        "sqnr_db_min": min(noise, default=None),
        "fold_error_max": max((tensor.fold_error or 0.0 for tensor in quantized), default=None),
    }
