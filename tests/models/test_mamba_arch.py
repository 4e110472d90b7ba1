"""The Mamba2 layers of a hybrid, as data."""

from __future__ import annotations

import inspect

from eightfold.layers.mamba2 import Mamba2
from eightfold.models.mamba_arch import MambaArch

ARCH = MambaArch(8, 12, 20, 4, 3, (0.0, 1.0), proj_bias=False, conv_bias=True)


def test_shapes_of_its_states() -> None:
    assert ARCH.conv_shape == (8 * 12 + 2 * 4 * 20, 2)
    assert ARCH.ssm_shape == (8, 12, 20)


def test_its_fields_are_arguments_of_the_layer() -> None:
    assert ARCH.arguments().keys() <= inspect.signature(Mamba2).parameters.keys()
