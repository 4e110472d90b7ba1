"""Random checkpoints of a shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eightfold.benchmarks.random_checkpoint import hash_of, read_config, write_checkpoint
from eightfold.hub.shapes import SHAPES
from eightfold.models.loader import open_checkpoint, read_model
from eightfold.models.registry import family_of
from tests.models.checkpoints import case, save_checkpoint


@pytest.mark.parametrize("file", sorted(SHAPES.glob("*.json")), ids=lambda file: file.stem)
def test_every_shape_that_comes_along_is_supported(file: Path) -> None:
    model = family_of(read_config(file.stem)).build(read_config(file.stem))
    assert len(model.arch.layout.attends) == json.loads(file.read_text())["num_hidden_layers"]


def test_a_shape_is_cut_to_its_first_layers() -> None:
    config = read_config("nemotron-3-nano", 6)
    assert (config["hybrid_override_pattern"], config["num_hidden_layers"]) == ("MEMEM*", 6)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=r"--config: got nowhere; expected a config\.json, or one of: .*nemotron-3-nano"):
        read_config("nowhere")


def test_what_is_written_is_a_whole_checkpoint(tmp_path: Path) -> None:
    saved = save_checkpoint(case("nemotron-latent"), tmp_path / "saved")
    folder = write_checkpoint(read_config(str(saved / "config.json")), tmp_path / "random")
    checkpoint = open_checkpoint(folder)
    needed = {part.name: part.shape for weight in read_model(folder).weights() for part in weight.parts}
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == needed
    tensors = load_file(folder / "model-00000.safetensors")
    first, second = (tensors[f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight"] for expert in (0, 1))
    assert first.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    assert abs(float(first.float().std()) * first.shape[1] ** 0.5 - 1) < 0.1


def test_the_number_of_a_name_is_the_same_everywhere() -> None:
    assert hash_of("ab") == 97 + 2 * 98
