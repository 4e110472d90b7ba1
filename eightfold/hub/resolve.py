"""From what a user calls a model to a folder: a folder, an alias, or the id of a repository on the Hugging Face hub."""

from __future__ import annotations

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
from eightfold.hub.aliases import PackagedModel
from eightfold.hub.names import EXPECTED, HubId, Shape, identify, with_config, with_weights
from eightfold.hub.packaged import packaged_folder
from eightfold.hub.shapes import shape_folder
from eightfold.types import Progress

# Weights, configuration, tokenizer and chat template; no code and no other weight formats.
HUB_WEIGHTS = ("*.safetensors",)
HUB_PATTERNS = (*HUB_WEIGHTS, "*.json", "*.jinja", "tokenizer*", "*.model")


def resolve_model(
    name: str, *, revision: str | None = None, report: Progress | None = None, needs_weights: bool = True
) -> Path:
    """The folder of a model, which is fetched and converted first where necessary.

    Args:
        name: a folder, a key of `ALIASES`, or `owner/name` on the hub.
        revision: branch, tag or commit of a hub id.
        report: told about downloads and conversion.
        needs_weights: False where the configuration and, if there is one, the tokenizer will do: weights are not fetched.

    Raises:
        CheckpointError: there is no such thing, it cannot be fetched, or it holds no safetensors.
    """
    match identify(name, revision, needs_weights=needs_weights):
        case Path() as folder:
            return folder
        case Shape() as shape:
            return shape_folder(shape.name)
        case HubId() as hub_id:
            folder = _from_hub(hub_id.name, hub_id.revision, report, needs_weights)
            return with_weights(folder) if needs_weights else with_config(folder)
        case PackagedModel() as packaged:
            return packaged_folder(name, packaged, report)


def _from_hub(name: str, revision: str | None, report: Progress | None, needs_weights: bool) -> Path:
    patterns = [item for item in HUB_PATTERNS if needs_weights or item not in HUB_WEIGHTS]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, tqdm_class=_reporting_bar(report)))
    except GatedRepoError as error:
        raise CheckpointError(
            "model",
            got=f"{name}, which is gated",
            expected="access to it",
            remedy="Ask for it on its page, then `hf auth login`.",
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError("model", got=f"{name}, which is neither a folder nor on the hub", expected=EXPECTED) from error
    except RevisionNotFoundError as error:
        raise CheckpointError("revision", got=revision, expected=f"a branch, tag or commit of {name}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            "model",
            got=f"{name}, which is no folder and cannot be fetched from the hub ({reason})",
            expected=EXPECTED,
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
