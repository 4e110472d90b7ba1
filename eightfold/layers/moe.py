"""Mixtures of experts: a router, experts of which each token uses a few, and what runs beside and around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eightfold.errors import InputError
from eightfold.kernels.operations import Activation, FusedBackend, MoeBackend, MoeSpec, Routing
from eightfold.kernels.selection import Kernels
from eightfold.layers.linear import Linear, LowLatencyLinear, weight_format
from eightfold.layers.mlp import MLP
from eightfold.layers.module import Chosen, FormatOf, Module
from eightfold.layers.weight import ExpertWeight, Weight
from eightfold.quant.mxfp8 import MXTensor
from eightfold.quant.policy import Role


class Router(Module):
    """Chooses experts, in fp32 whatever the activations are: two experts of nearly equal scores must not change places.

    Args:
        name: the router's name in the checkpoint, such as "backbone.layers.1.mixer.gate".
        hidden_size: width of the hidden states.
        routing: the rule.
        has_correction_bias: whether the checkpoint has an `e_score_correction_bias`.
    """

    def __init__(self, name: str, hidden_size: int, routing: Routing, *, has_correction_bias: bool) -> None:
        self.routing = routing
        self.weight = Weight(f"{name}.weight", Role.ROUTER, {f"{name}.weight": routing.num_experts}, hidden_size)
        bias = f"{name}.e_score_correction_bias"
        self.correction_bias = Weight(bias, Role.ROUTER, {bias: routing.num_experts}) if has_correction_bias else None
        self._fused: FusedBackend
        self._gate: Tensor
        self._bias: Tensor | None

    def bind(self, kernels: Kernels) -> None:
        """Take weights and backend."""
        self._fused = kernels.fused().backend
        self._gate = self.weight.take_dense().float()
        self._bias = None if self.correction_bias is None else self.correction_bias.take_dense().float()

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids `int64 [T, top_k]` and weights `float32 [T, top_k]` from `[T, hidden]`."""
        return self._fused.route(hidden_states, self._gate, self._bias, self.routing)


class Experts(Module):
    """The experts of one layer, as two weights of all: W13 `[E, 2 I, K]` (without a gate `[E, I, K]`) and W2 `[E, K, I]`.

    Args:
        name: the experts' name in the checkpoint, such as "backbone.layers.1.mixer.experts".
        in_features: K.
        intermediate_size: I.
        num_experts: E.
        top_k: experts of a token.
        activation: the function inside an expert.
        gated: whether experts have a gate.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        activation: Activation,
        gated: bool,
    ) -> None:
        self.name, self.top_k, self.activation, self.gated = name, top_k, activation, gated
        up = ("gate_proj", "up_proj") if gated else ("up_proj",)
        self.w13 = ExpertWeight(name, up, num_experts, intermediate_size, in_features, may_be_padded=True)
        self.w2 = ExpertWeight(name, ("down_proj",), num_experts, in_features, intermediate_size, may_be_padded=False)
        self._backend: MoeBackend
        self._prepared: Any

    def choose(self, kernels: Kernels, format_of: FormatOf) -> Iterator[Chosen]:
        """The experts' backend.

        Raises:
            InputError: the two weights have different formats, which no backend takes.
        """
        up, down = format_of(self.w13), format_of(self.w2)
        if up != down:
            raise InputError(
                f"experts {self.name}",
                got=f"{up} going up and {down} going down",
                expected="one format for both",
                remedy=f"Both are ignored or none is: name {self.name.rpartition('.')[2]}, not one of its projections.",
            )
        yield self._chosen(kernels, self._spec(kernels, format_of(self.w13)))

    def bind(self, kernels: Kernels) -> None:
        """Choose a backend for the experts as they were loaded, and hand them over to it."""
        w13, w2 = self.w13.take(), self.w2.take()
        quantized = (w13, w2) if isinstance(w13, MXTensor) and isinstance(w2, MXTensor) else None
        spec = self._spec(kernels, weight_format(w13), quantized)
        self.chosen = (self._chosen(kernels, spec),)
        self._backend = self.chosen[0].choice.backend
        self._prepared = self._backend.prepare(w13, w2, spec)

    def release(self) -> None:
        """Let go of the experts, where the backend has a layout of its own."""
        if not (self.w13.in_use and self.w2.in_use):
            self._prepared = None

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, `[T, K]`; arguments as in `MoeBackend.run`."""
        return self._backend.run(x, expert_ids, expert_weights, self._prepared)

    def _spec(self, kernels: Kernels, weight_format: str, weights: tuple[MXTensor, MXTensor] | None = None) -> MoeSpec:
        num_experts, in_features, intermediate_size = self.w2.shape
        return MoeSpec(
            self.name,
            num_experts,
            self.top_k,
            in_features,
            intermediate_size,
            self.gated,
            self.activation,
            weight_format,
            kernels.activation_dtype,
            weights,
        )

    def _chosen(self, kernels: Kernels, spec: MoeSpec) -> Chosen:
        return Chosen(f"experts {spec.weight_format}", self.name, kernels.moe(spec), (self.w13, self.w2))


class MoE(Module):
    """experts(x) of each token's choice, plus what the shared expert says.

    With latent projections the routed experts work in a narrower space: `fc1_latent_proj` leads into it and `fc2_latent_proj`
    back; router and shared expert see the hidden states themselves (LatentMoE, as in Nemotron-3).

    Args:
        hidden_size: width of the hidden states.
        router: chooses the experts.
        experts: the routed ones.
        shared: the one that every token uses, if any.
        shared_gate: the name of the projection to one number, whose sigmoid weighs the shared expert; None where it has none.
        latent: the common prefix of the latent projections' names, such as "backbone.layers.1.mixer", if there are any.
        latent_bias: whether those have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        router: Router,
        experts: Experts,
        *,
        shared: MLP | None = None,
        shared_gate: str | None = None,
        latent: str | None = None,
        latent_bias: bool = False,
    ) -> None:
        self.gate, self.experts, self.shared = router, experts, shared
        self.shared_gate = None if shared_gate is None else Linear(shared_gate, hidden_size, {shared_gate: 1}, role=Role.ROUTER)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if latent is not None:
            width = experts.w2.rows
            self.fc1_latent_proj = LowLatencyLinear(f"{latent}.fc1_latent_proj", hidden_size, width, bias=latent_bias)
            self.fc2_latent_proj = LowLatencyLinear(f"{latent}.fc2_latent_proj", width, hidden_size, bias=latent_bias)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """`[T, hidden]` from `[T, hidden]`."""
        expert_ids, expert_weights = self.gate(hidden_states)
        routed = hidden_states if self.fc1_latent_proj is None else self.fc1_latent_proj(hidden_states)
        routed = self.experts(routed, expert_ids, expert_weights)
        if self.fc2_latent_proj is not None:
            routed = self.fc2_latent_proj(routed)
        if self.shared is None:
            return routed
        shared = self.shared(hidden_states)
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(self.shared_gate(hidden_states))
        return routed + shared
