"""Write a checkpoint in MXFP8: the same bits that quantizing on arrival makes, in any of three dialects.

Tensors are read, quantized and written one shard at a time, so memory holds one shard. Everything is written into a folder
beside the final one, which gets its name when it is whole: where something fails, no folder looks like a checkpoint.
A checkpoint that is in MXFP8 already changes its dialect and none of its bits.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from eightfold.errors import CheckpointError, InputError
from eightfold.hub.resolve import resolve_model
from eightfold.kernels.hardware import detect
from eightfold.kernels.selection import Kernels
from eightfold.models.checkpoint import INDEX_NAME, Checkpoint, read_json
from eightfold.models.loader import LoadPlan, check_effect, open_checkpoint, plan, read_model
from eightfold.quant.checkpoints import HF_QUANT_CONFIG, written_configuration
from eightfold.quant.mxfp8 import BLOCK_SIZE, MXTensor, ScaleRule, num_blocks, quantize, sqnr_db
from eightfold.quant.policy import Policy
from eightfold.types import Progress

Format: TypeAlias = Literal["native", "modelopt", "compressed-tensors"]
_SCALE_SUFFIX: Mapping[Format, str] = {"native": "_scale_inv", "modelopt": "_scale", "compressed-tensors": "_scale"}
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        path: the folder.
        quantized: names of the tensors in MXFP8.
        kept: the other tensors' names, each with the reason.
        bytes_before: bytes of all tensors that were read.
        bytes_after: bytes of all tensors that were written.
        sqnr_db: signal to noise of each tensor that was quantized here, by name; empty where the source was in MXFP8.
        shards: files of weights.
        unaligned: names of the tensors in MXFP8 whose K is no multiple of 32, which other readers refuse.
    """

    path: Path
    quantized: tuple[str, ...]
    kept: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    sqnr_db: Mapping[str, float] = field(default_factory=dict)
    shards: int = 1
    unaligned: tuple[str, ...] = ()


def quantize_checkpoint(
    model: str,
    out: Path,
    *,
    dialect: Format,
    rule: ScaleRule = ScaleRule.CEIL,
    ignore: tuple[str, ...] = (),
    requantize: bool = False,
    max_shard_bytes: int = 5 * 10**9,
    report: Progress | None = None,
) -> Written:
    """Quantize a checkpoint and write it.

    Args:
        model: a folder, a hub id or an alias.
        out: the folder to make; it must not exist.
        dialect: whose configuration and names it gets.
        rule: how scales are chosen.
        ignore: layers to keep, as `--quantization-ignored-layers` takes them.
        requantize: as in `EngineConfig`.
        max_shard_bytes: most bytes in one file, where more than one tensor is in it.
        report: told about bytes read, as the phase "quantize".

    Raises:
        InputError: the folder exists, or the checkpoint cannot be read or quantized; then nothing is left behind.
    """
    if dialect not in get_args(Format):
        raise InputError("format", got=dialect, expected=f"one of: {', '.join(get_args(Format))}")
    if out.exists():
        raise InputError("OUT", got=f"{out}, which exists", expected="a folder to make")
    path = resolve_model(model, report=report)
    checkpoint = open_checkpoint(path)
    # Shapes and names are the model's; on which hardware it will run is not known here, and changes nothing.
    policy = Policy("mxfp8", ignore, requantize=requantize)
    kernels = Kernels(detect("cpu"), torch.float32)
    load_plan = plan(read_model(path), checkpoint, policy, kernels)
    check_effect(load_plan, kernels, rule)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        built = Path(scratch) / "model"
        built.mkdir()
        written = _Writer(checkpoint, load_plan, dialect, rule, max_shard_bytes).write(built, report)
        config = read_json(path / "config.json")
        kept_layers = sorted(set(_linear_layers_kept(checkpoint, load_plan)))
        inner, other = written_configuration(dialect, kept_layers)
        _write_json(built / "config.json", config | {"quantization_config": inner})
        for file in sorted(path.iterdir()):
            is_own = file.name in ("config.json", "README.md", INDEX_NAME, HF_QUANT_CONFIG) or file.name.startswith(".")
            if file.is_file() and not is_own and file.suffix not in _NOT_COPIED:
                shutil.copyfile(file, built / file.name)
        if other is not None:
            _write_json(built / HF_QUANT_CONFIG, other)
        (built / "README.md").write_text(_card(model, dialect, rule, written), encoding="utf-8")
        built.rename(out)
    unaligned = [
        info.stored_name
        for name, places in load_plan.destinations.items()
        if places[0].decision.quantized and (info := checkpoint.tensors[name]).shape[-1] % BLOCK_SIZE
    ]
    return Written(out, *written, tuple(unaligned))


def add_quality(folder: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Add lines to the table in the model card of a folder that `quantize_checkpoint` wrote."""
    card = folder / "README.md"
    added = "".join(f"| {name} | {value} |\n" for name, value in rows)
    card.write_text(card.read_text(encoding="utf-8") + added, encoding="utf-8")


def parse_bytes(text: str) -> int:
    """Bytes from "5GB", "200MB" or a plain number, in powers of ten.

    Raises:
        InputError: it is none of these.
    """
    number = text.strip().rstrip("BKMGbkmg")
    unit = text.strip()[len(number) :].upper()
    if unit not in _UNITS or not number.replace(".", "", 1).isdigit() or float(number) * _UNITS[unit] < 1:
        raise InputError("--max-shard-size", got=text, expected="a size such as 5GB or 200MB")
    return int(float(number) * _UNITS[unit])


_Result: TypeAlias = tuple[tuple[str, ...], Mapping[str, str], int, int, Mapping[str, float], int]


class _Writer:
    """Reads, quantizes and writes, a shard at a time. The size that each tensor will have is known, and so are the shards."""

    def __init__(self, checkpoint: Checkpoint, load_plan: LoadPlan, dialect: Format, rule: ScaleRule, most: int) -> None:
        self._checkpoint, self._rule, self._suffix = checkpoint, rule, _SCALE_SUFFIX[dialect]
        self._places = {name: places[0] for name, places in load_plan.destinations.items()}
        scales = {scale.name for place in self._places.values() for scale in place.stored.scales}
        self._names = [name for name in checkpoint.tensors if name not in scales]
        self._skipped = load_plan.skipped
        self._shards = self._divide(most)

    def write(self, folder: Path, report: Progress | None) -> _Result:
        quantized: list[str] = []
        noise: dict[str, float] = {}
        index: dict[str, str] = {}
        shard: dict[str, Tensor] = {}
        number, done, after = 0, 0, 0
        before = sum(info.nbytes for info in self._checkpoint.tensors.values())
        wanted = set(self._names)
        for info, tensor in self._checkpoint.read():
            if info.name not in wanted:
                continue
            if shard and info.name in self._shards:
                self._save(folder, number, shard, index)
                shard, number = {}, number + 1
            for name, value in self._entries(info.name, tensor, noise):
                shard[name] = value
                after += value.nbytes
            if self._is_quantized(info.name):
                quantized.append(info.stored_name)
            done += info.nbytes
            if report is not None:
                report("quantize", min(done, before), before)
        self._save(folder, number, shard, index)
        if self._shards:
            _write_json(folder / INDEX_NAME, {"metadata": {"total_size": after}, "weight_map": dict(sorted(index.items()))})
        kept = {
            self._checkpoint.tensors[name].stored_name: self._places[name].decision.reason
            if name in self._places
            else self._skipped[self._checkpoint.tensors[name].stored_name]
            for name in self._names
            if not self._is_quantized(name)
        }
        return tuple(quantized), kept, before, after, noise, number + 1

    def _is_quantized(self, name: str) -> bool:
        return name in self._places and self._places[name].decision.quantized

    def _entries(self, name: str, tensor: Tensor, noise: dict[str, float]) -> Iterator[tuple[str, Tensor]]:
        """What one weight becomes, by the names in the file."""
        stored_name = self._checkpoint.tensors[name].stored_name
        if name not in self._places:
            yield stored_name, tensor.clone()
            return
        value = self._places[name].arriving(self._checkpoint, tensor)
        if not self._is_quantized(name):
            yield stored_name, value.clone() if isinstance(value, Tensor) else tensor.clone()
            return
        if isinstance(value, Tensor):
            try:
                mx = quantize(value, self._rule)
            except ValueError as error:
                raise CheckpointError(f"tensor {stored_name}", got=str(error), expected="finite values") from error
            noise[stored_name] = sqnr_db(value, mx)
            value = mx
        if not isinstance(value, MXTensor):
            raise CheckpointError(f"tensor {stored_name}", got="FP8 that is not MX", expected="MXFP8", remedy="--requantize")
        yield stored_name, value.data.clone()
        yield stored_name + self._suffix, value.scale.clone()

    def _divide(self, most: int) -> frozenset[str]:
        """Names of the tensors that begin another shard."""
        begins, size = [], 0
        for name in self._names:
            info = self._checkpoint.tensors[name]
            nbytes = info.nbytes
            if self._is_quantized(name):
                *rows, k = info.shape
                nbytes = torch.Size(rows).numel() * (k + num_blocks(k))
            if size and size + nbytes > most:
                begins.append(name)
                size = 0
            size += nbytes
        return frozenset(begins)

    def _save(self, folder: Path, number: int, shard: Mapping[str, Tensor], index: dict[str, str]) -> None:
        count = len(self._shards) + 1
        name = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file(dict(shard), folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))


def _linear_layers_kept(checkpoint: Checkpoint, load_plan: LoadPlan) -> Iterator[str]:
    """Layers that a reader could take for quantized ones: every matrix that was kept and is no embedding of its own."""
    for name, places in load_plan.destinations.items():
        info = checkpoint.tensors[name]
        if not places[0].decision.quantized and len(info.shape) > 1 and "conv1d" not in name:
            yield info.stored_name.removesuffix(".weight")
    yield "lm_head"


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _card(model: str, dialect: Format, rule: ScaleRule, result: _Result) -> str:
    """The model card: what was done, and how much noise it made."""
    quantized, kept, before, after, noise, _ = result
    finite = [value for value in noise.values() if value not in (float("inf"), float("-inf"))]
    rows = [
        ("made from", model),
        ("dialect", dialect),
        ("scale rule", rule.value if noise else "as in the source"),
        ("tensors in MXFP8", str(len(quantized))),
        ("tensors kept", str(len(kept))),
        ("bytes", f"{before:,} became {after:,}"),
    ]
    if finite:
        worst = min(noise, key=lambda name: noise[name])
        rows.append(("signal to noise", f"{sum(finite) / len(finite):.2f} dB on average, {noise[worst]:.2f} in {worst}"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"---\ntags:\n- mxfp8\n---\n\n# {Path(model).name} in MXFP8\n\nWritten by Eightfold.\n\n| | |\n|---|---|\n{table}\n"
