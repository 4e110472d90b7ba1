"""The rows of the backend tables, driven with pretended hardware: choices and reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eightfold.errors import BackendError
from eightfold.kernels import native
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import AttentionSpec, LinearSpec
from eightfold.kernels.registry import Declined, Hardware
from eightfold.kernels.selection import UNBUILT_LINEAR, Kernels

NOT_BUILT = "the native library was not built: no C++ compiler when Eightfold was installed"
LINEAR = LinearSpec("model.layers.0.mlp.down_proj", 576, 1536, "mxfp8", torch.float32)
ATTENTION = AttentionSpec(9, 3, 64, 0.125, None, torch.float32)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "status", lambda: native.Status(None, NOT_BUILT))


def kernels(dtype: torch.dtype = torch.float32, **names: Any) -> Kernels:
    return Kernels(detect("cpu"), dtype, **names)


def test_a_cpu_with_the_native_library_takes_it_for_everything() -> None:
    found = kernels()
    assert found.linear(LINEAR).backend.name == "cpu"
    assert found.attention(ATTENTION).backend.name == "cpu"
    assert found.fused().backend.name == "cpu"


@pytest.mark.usefixtures("without_native")
def test_a_cpu_without_it_takes_the_reference_and_says_why() -> None:
    found = kernels()
    for choice in (found.linear(LINEAR), found.attention(ATTENTION), found.fused()):
        assert choice.backend.name == "reference"
        assert choice.declined == (Declined("cpu", NOT_BUILT),)


@pytest.mark.usefixtures("without_native")
def test_a_named_backend_that_was_not_built_is_an_error() -> None:
    with pytest.raises(BackendError, match=r"backend cpu, which declines: the native library was not built.*auto, reference"):
        kernels(linear_backend="cpu").linear(LINEAR)


def test_activations_that_the_native_kernels_do_not_take() -> None:
    choice = kernels(torch.float16).fused()
    assert (choice.backend.name, choice.declined) == ("reference", (Declined("cpu", "float16 activations"),))


@pytest.mark.parametrize("name", sorted(UNBUILT_LINEAR))
def test_words_of_other_engines_are_refused_with_a_sentence(name: str) -> None:
    with pytest.raises(
        BackendError, match=rf"fp8_gemm_backend: got {name}, which Eightfold does not have; expected one of: auto, "
    ):
        kernels(linear_backend=name)


@pytest.mark.parametrize("option", ["linear_backend", "attention_backend", "moe_backend"])
def test_a_word_that_is_no_backend_is_refused_whatever_the_model(option: str) -> None:
    named: dict[str, Any] = {option: "referense"}
    with pytest.raises(BackendError, match=r"_backend: got referense, which is no backend; .*Did you mean reference"):
        kernels(**named)


def test_naming_a_backend_for_products_changes_nothing_else() -> None:
    found = kernels(linear_backend="reference")
    assert found.linear(LINEAR).backend.name == "reference"
    assert found.attention(ATTENTION).backend.name == "cpu"
    assert found.fused().backend.name == "cpu"


def test_a_device_without_a_row_is_named() -> None:
    elsewhere = Hardware(torch.device("meta"), "a device that does not exist", None, frozenset(), 0, 1)
    with pytest.raises(BackendError, match="a device that does not exist"):
        Kernels(elsewhere, torch.float32).linear(LINEAR)
