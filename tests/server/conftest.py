"""Servers that tests share, since each takes some seconds to start. A test leaves them as it found them: without a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import LiveServer, live_server
from tests.tiny_tokenizer import save_text_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a chat template."""
    return save_text_checkpoint(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def null_server(tiny_checkpoint: Path) -> Iterator[LiveServer]:
    """A server over the null engine, a millisecond a step, whose model is called "tiny" and has a long context."""
    flags = ("--engine", "null", "--null-step-ms", "1", "--context-length", "300000", "--max-running-requests", "64")
    with live_server(tiny_checkpoint, *flags, "--served-model-name", "tiny") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path) -> Iterator[LiveServer]:
    """A server over the tiny Llama, which is called "tiny"."""
    with live_server(tiny_checkpoint, "--served-model-name", "tiny", "--max-total-tokens", "4096") as server:
        yield server
