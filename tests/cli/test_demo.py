"""`eightfold demo` over a tiny checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from eightfold.cli import main
from tests.tiny_tokenizer import save_text_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_demo_answers_and_tells_what_it_did(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", str(checkpoint), "--question", "hello?"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hello?\n")
    for row in (
        "tensors quantized",
        "tensors kept",
        "bytes in the files",
        "bytes in memory",
        "peak while loading",
        "backend",
        "time to first token",
    ):
        assert any(line.startswith(row) for line in out.splitlines())
