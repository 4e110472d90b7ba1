"""What `eightfold inspect` says of a checkpoint that is quantized already: its dialect, how much is covered, and every fault.

Loading stops at the first tensor that contradicts the configuration. Here all of them are found, from the headers alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eightfold.models.checkpoint import serialized_form
from eightfold.models.loader import open_checkpoint, read_model
from eightfold.models.matching import survey
from eightfold.quant.checkpoints import Dialect, Scheme


@dataclass(frozen=True, slots=True)
class SerializedReport:
    """What is in the files, and what contradicts the configuration.

    Attributes:
        dialect: whose names and keys the configuration has.
        source: the file that it stands in.
        tensors: how weights of projections, experts and the output head are stored, and how many of them are: such as
            "MXFP8", "FP8 in blocks of 128 x 128", or "not quantized".
        covered: the share of the elements of those weights that is quantized, 0 to 1.
        excluded: the configuration's patterns of layers to keep, and of how many tensors each is the one that keeps them.
        kv_cache: the format of keys and values that it was calibrated for; None where it says nothing.
        disagreements: one for each tensor, or each fused weight, that is not as the configuration says.
    """

    dialect: Dialect
    source: str
    tensors: Mapping[str, int]
    covered: float
    excluded: Mapping[str, int]
    kv_cache: str | None
    disagreements: tuple[str, ...]


def report_serialized(path: Path) -> SerializedReport | None:
    """Look at the headers of a checkpoint folder.

    Returns:
        None where its configuration says nothing of quantization.

    Raises:
        CheckpointError: files that are missing or damaged, or a configuration that is not supported.
    """
    serialized = serialized_form(path)
    if serialized is None:
        return None
    found, faults = survey(read_model(path), open_checkpoint(path))
    weights = [stored for role, stored in found if role.quantizable]
    elements = sum(math.prod(stored.info.shape) for stored in weights)
    quantized = sum(math.prod(stored.info.shape) for stored in weights if stored.scheme is not None)
    kept = Counter(stored.excluded for _, stored in found if stored.excluded is not None)
    return SerializedReport(
        dialect=serialized.dialect,
        source=serialized.source,
        tensors=dict(Counter(_form(stored.scheme) for stored in weights).most_common()),
        covered=quantized / elements if elements else 0.0,
        excluded={pattern: kept[pattern] for pattern in dict.fromkeys(serialized.excluded)},
        kv_cache=serialized.kv_cache,
        disagreements=tuple(map(str, faults)),
    )


def _form(scheme: Scheme | None) -> str:
    """A scheme in words."""
    if scheme is None:
        return "not quantized"
    static = " and static activations" if scheme.static else ""
    match scheme.scale_of:
        case "group":
            return "MXFP8"
        case "block":
            rows, columns = scheme.block or (0, 0)
            return f"FP8 in blocks of {rows} x {columns}{static}"
        case "row":
            return f"FP8 with a scale a tensor or channel{static}"
    return f"FP8 with a scale a {scheme.scale_of}{static}"
