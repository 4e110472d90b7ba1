"""Multilayer perceptrons, gated and not."""

from __future__ import annotations

from torch import Tensor

from eightfold.kernels.operations import Activation, FusedBackend
from eightfold.kernels.selection import Kernels
from eightfold.layers.linear import Linear
from eightfold.layers.module import Module


class MLP(Module):
    """down(act(gate(x)) * up(x)), or without a gate down(act(up(x))).

    A gated one has silu (SwiGLU, arXiv 2002.05202), one without a gate relu2 (arXiv 2109.08668).

    Args:
        name: its name in the checkpoint, such as "model.layers.0.mlp".
        hidden_size: width of the hidden states.
        intermediate_size: width inside.
        activation: the function inside.
        gated: whether there is a gate.
        bias: whether the projections have biases.
        fused: whether gate and up are one tensor in the checkpoint, as Granite has them: `input_linear`, `output_linear`.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        gated: bool,
        bias: bool = False,
        fused: bool = False,
    ) -> None:
        self.activation, self.gated = activation, gated
        up = ("gate_proj", "up_proj") if gated else ("up_proj",)
        parts = {f"{name}.{part}": intermediate_size for part in up}
        up_name, down_name = f"{name}.{'gate_up_proj' if gated else 'up_proj'}", f"{name}.down_proj"
        if fused:
            up_name, down_name = f"{name}.input_linear", f"{name}.output_linear"
            parts = {up_name: sum(parts.values())}
        self.up_proj = Linear(up_name, hidden_size, parts, bias=bias)
        self.down_proj = Linear(down_name, intermediate_size, {down_name: hidden_size}, bias=bias)
        self._fused: FusedBackend

    def bind(self, kernels: Kernels) -> None:
        """Take the backends."""
        super().bind(kernels)
        self._fused = kernels.fused().backend

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """`[T, hidden]` from `[T, hidden]`."""
        return self.down_proj(activate(self._fused, self.up_proj(hidden_states), self.activation, gated=self.gated))


def activate(fused: FusedBackend, x: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """`[T, I]` from x: `[T, 2 I]`, gates before ups, or without a gate `[T, I]`."""
    match activation, gated:
        case "silu", True:
            return fused.silu_and_mul(x)
        case "relu2", False:
            return fused.relu2(x)
    raise ValueError(f"there is no operation for {activation} {'with' if gated else 'without'} a gate")
