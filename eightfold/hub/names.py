"""What the name of a model stands for. Nothing is fetched and nothing heavy imported, so a wrong name is refused at once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from eightfold.errors import CheckpointError
from eightfold.hub.aliases import ALIASES, PackagedModel
from eightfold.hub.shapes import shape_names

OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
EXPECTED = f"a folder, a hub id such as owner/name, or an alias: {', '.join(ALIASES)}"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on the Hugging Face hub: `owner/name`, and a branch, tag or commit where one was asked for."""

    name: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class Shape:
    """A configuration that comes along, without weights."""

    name: str


Source: TypeAlias = Path | PackagedModel | HubId | Shape


def identify(name: str, revision: str | None = None, *, needs_weights: bool = True) -> Source:
    """A folder with weights, a model that comes in a package, or a hub id.

    Args:
        name: a folder, a key of `ALIASES`, or `owner/name`; without the need of weights also a name of `shape_names`.
        revision: branch, tag or commit of a hub id.
        needs_weights: False where a configuration alone will do.

    Raises:
        CheckpointError: it is none of these, a folder without safetensors, or a revision of what has none.
    """
    shapes = shape_names()
    path = Path(name).expanduser()
    is_hub_id = not path.exists() and name not in ALIASES and _HUB_ID.fullmatch(name) is not None
    if revision is not None and not is_hub_id:
        raise CheckpointError("revision", got=revision, expected=f"none: {name} is no hub id, and nothing else has revisions")
    if path.is_file():
        raise CheckpointError("model", got=f"the file {name}", expected="a folder with safetensors weights and config.json")
    if path.is_dir():
        return with_weights(path) if needs_weights else with_config(path)
    if name in ALIASES:
        return ALIASES[name]
    if name in shapes and not needs_weights:
        return Shape(name)
    if name in shapes:
        remedy = "--load-format dummy makes random weights of it."
        raise CheckpointError("model", got=f"{name}, a configuration without weights", expected=EXPECTED, remedy=remedy)
    if is_hub_id:
        return HubId(name, revision)
    near = get_close_matches(name, [*ALIASES, *(() if needs_weights else shapes)], n=1)
    remedy = f"Did you mean {near[0]}?" if near else ""
    expected = EXPECTED if needs_weights else f"{EXPECTED}, or a configuration that comes along: {', '.join(shapes)}"
    raise CheckpointError("model", got=f"{name!r}, where there is no folder", expected=expected, remedy=remedy)


def with_config(folder: Path) -> Path:
    """The folder, which holds a config.json.

    Raises:
        CheckpointError: it holds none.
    """
    if (folder / "config.json").is_file():
        return folder
    raise CheckpointError("model", got=f"{folder}, which holds no config.json", expected="a folder with config.json")


def with_weights(folder: Path) -> Path:
    """The folder, which holds safetensors. Said here, before anybody misses its config.json.

    Raises:
        CheckpointError: it holds none, naming other weights where there are some.
    """
    if any(folder.glob("*.safetensors")):
        return folder
    others = sorted(file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern))
    got = f"{folder}, which holds no *.safetensors" + (f" but {others[0]}" if others else "")
    remedy = "transformers converts it: from_pretrained reads it and save_pretrained writes safetensors." if others else ""
    raise CheckpointError("model", got=got, expected="a folder with safetensors weights and config.json", remedy=remedy)
