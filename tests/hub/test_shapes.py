"""Configurations that come along."""

from __future__ import annotations

from pathlib import Path

import pytest

from eightfold.errors import CheckpointError
from eightfold.hub.names import Shape, identify
from eightfold.hub.resolve import resolve_model
from eightfold.hub.shapes import SHAPES, shape_folder, shape_names


def test_a_shape_becomes_a_folder_that_follows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EIGHTFOLD_CACHE", str(tmp_path))
    folder = shape_folder("nemotron-3-nano")
    content = (SHAPES / "nemotron-3-nano.json").read_bytes()
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    (folder / "config.json").write_text("of an older version")
    assert (shape_folder("nemotron-3-nano") / "config.json").read_bytes() == content


def test_a_shape_is_a_model_only_where_no_weights_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EIGHTFOLD_CACHE", str(tmp_path))
    assert "llama-3.1-8b" in shape_names()
    assert identify("llama-3.1-8b", needs_weights=False) == Shape("llama-3.1-8b")
    assert resolve_model("llama-3.1-8b", needs_weights=False) == tmp_path / "shapes" / "llama-3.1-8b"
    with pytest.raises(CheckpointError, match=r"llama-3\.1-8b, a configuration without weights.*--load-format dummy"):
        identify("llama-3.1-8b")
    with pytest.raises(CheckpointError, match=r"comes along: .*nemotron-3-nano.*Did you mean llama-3\.1-8b\?"):
        identify("llama-3-8b", needs_weights=False)


def test_a_configuration_alone_will_do_where_no_weights_are_needed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        identify(str(tmp_path), needs_weights=False)
    (tmp_path / "config.json").touch()
    assert identify(str(tmp_path), needs_weights=False) == tmp_path
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        identify(str(tmp_path))
