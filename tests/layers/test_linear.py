"""Fused dense products, quantized or not."""

from __future__ import annotations

import pytest
import torch

from eightfold.errors import BackendError
from eightfold.layers.linear import Linear
from eightfold.quant.mxfp8 import dequantize, quantize
from tests.layers.helpers import fill, kernels


def layer(bias: bool = False) -> Linear:
    return Linear("l.qkv_proj", 40, {"l.q": 6, "l.k": 3}, bias=bias)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantization", [None, "mxfp8"])
def test_parts_are_stacked_in_their_order(quantization: str | None, bias: bool, backend: str) -> None:
    linear = layer(bias)
    values = fill(linear, quantization)
    linear.bind(kernels(linear_backend=backend))
    x = torch.randn(5, 40)
    weights = [values["l.q.weight"], values["l.k.weight"]]
    if quantization is not None:
        weights = [dequantize(quantize(weight)) for weight in weights]
    expected = torch.cat([x @ weight.T for weight in weights], dim=1)
    if bias:
        expected += torch.cat([values["l.q.bias"], values["l.k.bias"]])
    assert torch.allclose(linear(x), expected, rtol=1e-5, atol=1e-5)


def test_the_choice_is_kept_with_its_request() -> None:
    linear = layer()
    fill(linear, "mxfp8")
    linear.bind(kernels(linear_backend="reference"))
    (chosen,) = linear.chosen
    assert (chosen.choice.backend.name, chosen.choice.requested) == ("reference", "reference")
    assert (chosen.operation, chosen.layer, chosen.weights) == ("linear mxfp8", "l.qkv_proj", (linear.weight,))


def test_a_named_backend_governs_quantized_weights_only() -> None:
    linear = layer()
    fill(linear, None)
    linear.bind(kernels(linear_backend="reference"))
    assert linear.chosen[0].choice.requested == "auto"


def test_a_backend_that_cannot_run_names_the_layer_and_its_shape() -> None:
    linear = layer()
    fill(linear, "mxfp8")
    with pytest.raises(BackendError, match=r"linear l\.qkv_proj \[9 x 40\] mxfp8: got backend fold, which is not for "):
        linear.bind(kernels(linear_backend="fold"))
