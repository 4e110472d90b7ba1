"""The table of supported model types."""

from __future__ import annotations

import pytest

from eightfold.errors import CheckpointError
from eightfold.models.arch import DECODER_FAMILIES
from eightfold.models.decoder import Decoder
from eightfold.models.registry import FAMILIES, family_of
from tests.models.checkpoints import CASES


def test_every_decoder_family_is_in_it_and_has_a_tiny_checkpoint() -> None:
    assert FAMILIES.keys() == DECODER_FAMILIES.keys()
    assert {case.make_config().model_type for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_reads_and_builds(model_type: str) -> None:
    config = next(case.make_config() for case in CASES if case.make_config().model_type == model_type)
    family = family_of(config.to_dict())
    model = family.build(family.read_arch(config.to_dict()))
    assert isinstance(model, Decoder)
    assert len(model.layers) == config.num_hidden_layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, r"got 'lama'; expected one of: llama, .*Did you mean llama\?"),
        ({"model_type": "nemotron_h"}, "got 'nemotron_h'; expected one of"),
        ({}, "model_type: got None"),
        ({"model_type": ["llama"]}, r"model_type: got \['llama'\]"),
    ],
)
def test_an_unsupported_type_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(config)
