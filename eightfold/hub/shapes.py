"""Configurations of known models that come along, for `--load-format dummy`: shapes without weights and without a tokenizer."""

from __future__ import annotations

from pathlib import Path

from eightfold.config import cache_dir

SHAPES = Path(__file__).resolve().parents[1] / "benchmarks" / "configs"


def shape_names() -> tuple[str, ...]:
    """The names of all shapes, such as "nemotron-3-nano"."""
    return tuple(sorted(file.stem for file in SHAPES.glob("*.json")))


def shape_folder(name: str) -> Path:
    """A folder with the config.json of a shape, below the user's cache."""
    folder = cache_dir() / "shapes" / name
    content, file = (SHAPES / f"{name}.json").read_bytes(), folder / "config.json"
    if not (file.is_file() and file.read_bytes() == content):
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / "config.json.partial"
        partial.write_bytes(content)
        partial.replace(file)
    return folder
