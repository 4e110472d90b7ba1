"""The peer, as far as it can be tested without being installed."""

from __future__ import annotations

import importlib.util

import pytest

from eightfold.benchmarks.llama_cpp import is_installed, q8_0_file
from eightfold.errors import InputError


def test_it_knows_whether_it_can_run() -> None:
    assert is_installed() == (importlib.util.find_spec("llama_cpp") is not None)


def test_only_packaged_models_have_a_file() -> None:
    with pytest.raises(InputError, match=r"model: got llama9; expected an alias.*smollm2"):
        q8_0_file("llama9")
