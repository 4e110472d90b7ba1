"""What names stand for, decided without fetching or importing anything heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eightfold.errors import CheckpointError
from eightfold.hub.aliases import ALIASES
from eightfold.hub.names import HubId, identify


def test_a_folder_an_alias_and_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert identify(str(tmp_path)) == tmp_path
    assert identify("smollm2") is ALIASES["smollm2"]
    assert identify("owner/name", "main") == HubId("owner/name", "main")


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("/nowhere/at/all", None, "'/nowhere/at/all', where there is no folder; expected a folder, a hub id"),
        ("smollm", None, r"Did you mean smollm2\?"),
        ("smollm2", "main", "revision: got main; expected none: smollm2 is no hub id"),
        ("", None, "expected a folder"),
    ],
)
def test_what_is_none_of_these_is_refused(name: str, revision: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        identify(name or str(tmp_path), revision)


def test_a_wrong_name_costs_no_heavy_import() -> None:
    code = "import sys, eightfold.hub.names; sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
