"""Which model types are supported: for each, who reads its configuration and what it is built as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from eightfold.errors import CheckpointError
from eightfold.models.arch import DECODER_FAMILIES, DecoderArch, read_arch
from eightfold.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Family:
    """How one model type is read and built.

    Attributes:
        read_arch: a checkpoint's `config.json` to a normalised architecture; refuses what is not supported, by key.
        build: the architecture to a model without weights.
    """

    read_arch: Callable[[Mapping[str, Any]], DecoderArch]
    build: Callable[[DecoderArch], Decoder]


DECODER = Family(read_arch, Decoder)
FAMILIES: Mapping[str, Family] = MappingProxyType(dict.fromkeys(DECODER_FAMILIES, DECODER))


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's configuration.

    Raises:
        CheckpointError: its `model_type` is missing or not supported, with the nearest one that is.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = get_close_matches(str(model_type), FAMILIES, n=1)
        remedy = f"Did you mean {near[0]}?" if near else ""
        raise CheckpointError("model_type", got=repr(model_type), expected=f"one of: {', '.join(FAMILIES)}", remedy=remedy)
    return FAMILIES[model_type]
