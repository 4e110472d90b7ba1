"""Mixtures of experts against formulas, and what must hold of their parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from eightfold.errors import BackendError
from eightfold.kernels.operations import Routing
from eightfold.layers.mlp import MLP
from eightfold.layers.moe import Experts, MoE, Router
from eightfold.quant.mxfp8 import dequantize, quantize
from tests.layers.helpers import fill, kernels

HIDDEN, WIDTH, LATENT = 40, 33, 24
ROUTING = Routing(5, 2, "softmax", normalize=True)
SIGMOID = Routing(6, 2, "sigmoid", normalize=True, scale=2.5, num_groups=3, topk_groups=2)


def experts_of(*, gated: bool, in_features: int = HIDDEN, num_experts: int = 5) -> Experts:
    return Experts(
        "m.experts",
        in_features,
        WIDTH,
        num_experts=num_experts,
        top_k=2,
        activation="silu" if gated else "relu2",
        gated=gated,
    )


def by_formula(values: dict[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor, *, gated: bool, mxfp8: bool) -> Tensor:
    """One token, one expert at a time, from the checkpoint's tensors."""

    def weight(expert: int, part: str) -> Tensor:
        value = values[f"m.experts.{expert}.{part}_proj.weight"]
        return dequantize(quantize(value)) if mxfp8 else value

    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, share in zip(ids[token].tolist(), weights[token], strict=True):
            up = weight(expert, "up") @ x[token]
            inner = torch.nn.functional.silu(weight(expert, "gate") @ x[token]) * up if gated else up.relu().square()
            out[token] += share * (weight(expert, "down") @ inner)
    return out


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("mxfp8", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_experts(gated: bool, mxfp8: bool, backend: str) -> None:
    experts = experts_of(gated=gated)
    values = fill(experts, "mxfp8" if mxfp8 else None)
    experts.bind(kernels(moe_backend=backend))
    x = torch.randn(7, HIDDEN)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    expected = by_formula(values, x, ids, weights, gated=gated, mxfp8=mxfp8)
    torch.testing.assert_close(experts(x, ids, weights), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_the_choice_of_experts_says_what_it_is_for() -> None:
    experts = experts_of(gated=False)
    fill(experts, "mxfp8")
    (planned,) = experts.choose(kernels(), lambda weight: "mxfp8")
    experts.bind(kernels())
    (chosen,) = experts.chosen
    assert planned == chosen
    assert (chosen.operation, chosen.layer, chosen.weights) == ("experts mxfp8", "m.experts", (experts.w13, experts.w2))


def test_fault_7_a_named_backend_that_cannot_run_names_the_experts_and_their_shape() -> None:
    experts = experts_of(gated=True)
    with pytest.raises(BackendError, match=r"m\.experts .*5.*: got backend fold, which is not for "):
        list(experts.choose(kernels(moe_backend="fold"), lambda weight: "mxfp8"))


@pytest.mark.parametrize("routing", [ROUTING, SIGMOID])
def test_a_router_in_bf16_chooses_as_in_fp32(routing: Routing) -> None:
    """Scores are fp32 and so is the bias, whatever the activations are."""
    router = Router("m.gate", HIDDEN, routing, has_correction_bias=routing.scoring == "sigmoid")
    fill(router)
    router.bind(kernels())
    x = torch.randn(50, HIDDEN).bfloat16()
    ids, weights = router(x)
    expected_ids, expected_weights = router(x.float())
    assert weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected_weights)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_correction_bias_is_fp32_from_the_file_on(stored: torch.dtype) -> None:
    router = Router("m.gate", HIDDEN, SIGMOID, has_correction_bias=True)
    assert router.correction_bias is not None
    assert router.correction_bias.role.keeps_precision
    assert router.weight.role.keeps_precision
    del stored


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("shared", [None, "plain", "gated"])
def test_the_whole_is_the_sum_of_its_parts(shared: str | None, latent: bool) -> None:
    routing = dataclasses.replace(SIGMOID, num_experts=6)
    moe = MoE(
        HIDDEN,
        Router("m.gate", HIDDEN, routing, has_correction_bias=True),
        experts_of(gated=False, in_features=LATENT if latent else HIDDEN, num_experts=6),
        shared=None if shared is None else MLP("m.shared", HIDDEN, 30, activation="relu2", gated=False),
        shared_gate="m.shared_gate" if shared == "gated" else None,
        latent="m" if latent else None,
        latent_bias=True,
    )
    values = fill(moe)
    moe.bind(kernels())
    x = torch.randn(9, HIDDEN)
    ids, weights = moe.gate(x)

    def project(layer: str, inputs: Tensor) -> Tensor:
        return inputs @ values[f"{layer}.weight"].T + values.get(f"{layer}.bias", torch.zeros(1))

    inner = project("m.fc1_latent_proj", x) if latent else x
    expected = by_formula(values, inner, ids, weights, gated=False, mxfp8=False)
    expected = project("m.fc2_latent_proj", expected) if latent else expected
    if shared is not None:
        said = project("m.shared.down_proj", project("m.shared.up_proj", x).relu().square())
        expected = expected + (said * project("m.shared_gate", x).sigmoid() if shared == "gated" else said)
    torch.testing.assert_close(moe(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_the_way_into_the_latent_space_asks_for_low_latency_once_the_weight_is_what_it_becomes() -> None:
    """Fault 1's companion: decided in a constructor, it would look at a weight in bf16."""
    moe = MoE(
        HIDDEN,
        Router("m.gate", HIDDEN, ROUTING, has_correction_bias=False),
        experts_of(gated=False, in_features=LATENT),
        latent="m",
    )
    assert moe.fc1_latent_proj is not None
    assert not moe.fc1_latent_proj.chosen
    for quantization, weight_format in (("mxfp8", "mxfp8"), (None, "float32")):
        fill(moe, quantization)
        moe.bind(kernels())
        chosen = moe.fc1_latent_proj.chosen
        assert [item.operation for item in chosen] == [f"linear {weight_format}", f"low latency {weight_format}"]
