from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import pytest

from eightfold.hub.aliases import ALIASES


def test_an_alias_can_be_no_path_and_no_hub_id() -> None:
    assert all(re.fullmatch(r"[a-z0-9-]+", alias) for alias in ALIASES)


def test_entries_are_pinned_and_cannot_be_changed() -> None:
    entry = ALIASES["smollm2"]
    assert entry.version == "0.1.2"
    with pytest.raises(FrozenInstanceError):
        entry.version = "0.2"  # type: ignore[misc]
    with pytest.raises(TypeError):
        ALIASES["other"] = entry  # type: ignore[index]
