"""A checkpoint of a given shape with random bf16 weights, for measuring what does not depend on what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eightfold.hub.shapes import SHAPES, shape_names
from eightfold.layers.weight import Part
from eightfold.models.loader import read_model

_SHARD_BYTES = 1 << 30


def read_config(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """A configuration by the name of a shape that comes with Eightfold, or from a file; cut to its first layers.

    Raises:
        SystemExit: no such shape and no such file.
    """
    file = SHAPES / f"{name}.json" if name in shape_names() else Path(name)
    if not file.is_file():
        known = ", ".join(shape_names())
        raise SystemExit(f"--config: got {name}; expected a config.json, or one of: {known}")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        for key in ("hybrid_override_pattern", "layers_block_type", "layer_types"):
            if config.get(key) is not None:
                config[key] = config[key][:num_layers]
    return config


def write_checkpoint(config: dict[str, Any], folder: Path) -> Path:
    """Write files of at most about a gigabyte, each held in memory while it is written.

    Values are normal with a standard deviation of 1 / sqrt(K): one block of a million of them, begun at another place for each
    row group, since drawing billions would take longer than everything that is measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(_shards(folder)):
        file = f"model-{index:05d}.safetensors"
        save_file({part.name: _values(part, noise) for part in shard}, folder / file, metadata={"format": "pt"})
        weight_map |= {part.name: file for part in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def _shards(folder: Path) -> Iterator[list[Part]]:
    shard: dict[str, Part] = {}
    size = 0
    for weight in read_model(folder).weights():
        for part in weight.parts:
            shard[part.name] = part
            size += 2 * math.prod(part.shape)
            if size >= _SHARD_BYTES:
                yield list(shard.values())
                shard, size = {}, 0
    if shard:
        yield list(shard.values())


def _values(part: Part, noise: Tensor) -> Tensor:
    count = math.prod(part.shape)
    start = hash_of(part.name) % noise.numel()
    repeated = noise.roll(-start).repeat(-(-count // noise.numel()))[:count]
    return (repeated / math.sqrt(part.shape[-1])).view(part.shape)


def hash_of(name: str) -> int:
    """A number that is the same for a name in every process."""
    return sum(position * byte for position, byte in enumerate(name.encode(), start=1))
