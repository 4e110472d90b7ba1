"""The table of supported model types."""

from __future__ import annotations

import pytest

from eightfold.errors import CheckpointError
from eightfold.models.decoder import Decoder
from eightfold.models.families import DECODER_FAMILIES
from eightfold.models.granite_hybrid import GraniteHybrid
from eightfold.models.nemotron_h import NemotronH
from eightfold.models.registry import FAMILIES, family_of
from tests.models.checkpoints import CASES


def test_every_family_is_in_it_and_has_a_tiny_checkpoint() -> None:
    assert DECODER_FAMILIES.keys() < FAMILIES.keys()
    assert {case.make_config().model_type for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_reads_and_builds(model_type: str) -> None:
    config = next(case.make_config() for case in CASES if case.make_config().model_type == model_type)
    model = family_of(config.to_dict()).build(config.to_dict())
    assert isinstance(model, Decoder | NemotronH | GraniteHybrid)
    assert len(model.layers) == config.num_hidden_layers == len(model.arch.layout.attends)
    assert model.arch.model_type == model_type


@pytest.mark.parametrize(
    ("model_type", "stored", "canonical"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.11.w1.weight", "model.layers.0.mlp.experts.11.gate_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2.weight", "model.layers.0.mlp.experts.1.down_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w3.weight", "model.layers.0.mlp.experts.1.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("nemotron_h", "model.layers.0.mixer.D", "backbone.layers.0.mixer.D"),
        ("nemotron_h", "backbone.layers.0.mixer.D", "backbone.layers.0.mixer.D"),
    ],
)
def test_names_in_files_become_those_of_the_model(model_type: str, stored: str, canonical: str) -> None:
    assert FAMILIES[model_type].canonical(stored) == canonical


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, r"got 'lama'; expected one of: llama, .*Did you mean llama\?"),
        ({"model_type": "nemotron"}, r"got 'nemotron'; expected one of: .*Did you mean nemotron_h\?"),
        ({}, "model_type: got None"),
        ({"model_type": ["llama"]}, r"model_type: got \['llama'\]"),
    ],
)
def test_an_unsupported_type_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(config)
