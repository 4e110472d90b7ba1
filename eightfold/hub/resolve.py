"""From what a user calls a model to a folder: a folder, an alias, or the id of a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from eightfold.errors import CheckpointError
from eightfold.hub.aliases import ALIASES
from eightfold.hub.packaged import packaged_folder
from eightfold.types import Progress

# Weights, configuration, tokenizer and chat template; no code and no other weight formats.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model")
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EXPECTED = f"a folder, a hub id such as owner/name, or an alias: {', '.join(ALIASES)}"


def resolve_model(name: str, *, revision: str | None = None, report: Progress | None = None) -> Path:
    """The folder of a model, which is fetched and converted first where necessary.

    Args:
        name: a folder, a key of `ALIASES`, or `owner/name` on the hub.
        revision: branch, tag or commit of a hub id.
        report: told about downloads and conversion.

    Raises:
        CheckpointError: there is no such thing, it cannot be fetched, or it holds no safetensors.
    """
    path = Path(name).expanduser()
    is_hub_id = not path.exists() and name not in ALIASES and _HUB_ID.fullmatch(name) is not None
    if revision is not None and not is_hub_id:
        raise CheckpointError("revision", got=revision, expected=f"none: {name} is no hub id, and nothing else has revisions")
    if path.is_file():
        raise CheckpointError("model", got=f"the file {name}", expected="a folder with safetensors weights and config.json")
    if path.is_dir():
        return _with_weights(path)
    if name in ALIASES:
        return packaged_folder(name, ALIASES[name], report)
    if is_hub_id:
        return _with_weights(_from_hub(name, revision, report))
    near = get_close_matches(name, ALIASES, n=1)
    remedy = f"Did you mean {near[0]}?" if near else ""
    raise CheckpointError("model", got=f"{name!r}, where there is no folder", expected=_EXPECTED, remedy=remedy)


def _with_weights(folder: Path) -> Path:
    """`folder`, which holds safetensors. Said here, before anybody misses its config.json."""
    if any(folder.glob("*.safetensors")):
        return folder
    others = sorted(file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern))
    got = f"{folder}, which holds no *.safetensors" + (f" but {others[0]}" if others else "")
    remedy = "transformers converts it: from_pretrained reads it and save_pretrained writes safetensors." if others else ""
    raise CheckpointError("model", got=got, expected="a folder with safetensors weights and config.json", remedy=remedy)


def _from_hub(name: str, revision: str | None, report: Progress | None) -> Path:
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(HUB_PATTERNS), tqdm_class=_reporting_bar(report))
        )
    except GatedRepoError as error:
        raise CheckpointError(
            "model",
            got=f"{name}, which is gated",
            expected="access to it",
            remedy="Ask for it on its page, then `hf auth login`.",
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError("model", got=f"{name}, which is neither a folder nor on the hub", expected=_EXPECTED) from error
    except RevisionNotFoundError as error:
        raise CheckpointError("revision", got=revision, expected=f"a branch, tag or commit of {name}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            "model",
            got=f"{name}, which is no folder and cannot be fetched from the hub ({reason})",
            expected=_EXPECTED,
            remedy="Offline, give a folder, or a hub id that was fetched before.",
        ) from error


def _reporting_bar(report: Progress | None) -> type[tqdm]:
    """The hub's progress bar, which draws nothing and passes the bytes on to `report`."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The hub has further bars: one counts files, one the bytes before they are unpacked.
            self.counts_bytes = kwargs.get("name") == "huggingface_hub.snapshot_download"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if report is not None and self.counts_bytes:
                report("download", int(self.n), int(self.total or 0))

    return Bar
