"""Modules of a transformers model whose weights are in MXFP8: widened for each product, and no further changed.

A weight is two parameters, E4M3 elements under its own name and bytes of scales under that name and `_scale_inv`. Widening is
exact in fp32, and in bf16 while scale exponents lie in -124..119. So what is saved is memory and not time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eightfold.quant.mxfp8 import MXTensor, dequantize, empty
from eightfold.quant.policy import Role

SCALE_SUFFIX = "_scale_inv"
"""What the name of a scale adds to that of its weight."""
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


class Quantized(nn.Module):
    """A module some of whose parameters are in MXFP8."""

    def values(self, name: str, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """A weight `[N, K]` in `dtype`: the whole parameter, or that of one expert.

        Raises:
            ValueError: the elements or the scales were cast to another dtype.
        """
        data, scale = getattr(self, name).detach(), getattr(self, name + SCALE_SUFFIX).detach()
        return dequantize(MXTensor(data, scale) if index is None else MXTensor(data[index], scale[index]), dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # A cast of the whole model is meant for values. Elements are no values without their scales, so they travel as bytes.
        def as_bytes(tensor: Tensor) -> Tensor:
            return fn(tensor.view(torch.uint8)).view(tensor.dtype) if tensor.dtype == torch.float8_e4m3fn else fn(tensor)

        return super()._apply(as_bytes, recurse)  # type: ignore[no-untyped-call]


class QuantizedLinear(Quantized, nn.Linear):
    """`x @ weight.T + bias` with a weight in MXFP8."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """`[..., K]` to `[..., N]`, in the dtype of the input."""
        return functional.linear(input, self.values("weight", input.dtype), self.bias)


class QuantizedExperts(Quantized):
    """Experts in one tensor for each projection, `[E, N, K]`. Those that a token wants are widened, one by one.

    It is mixed into a class of transformers that has `act_fn`, `has_gate` and `_apply_gate`.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, K]` to `[T, K]`, with the chosen experts and their weights, each `[T, top_k]`."""
        module: Any = self
        dtype = hidden_states.dtype
        first, second = expert_weights(self)
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, choices = torch.where(top_k_index == expert)
            inner = functional.linear(hidden_states[tokens], self.values(first, dtype, expert))
            inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
            made = functional.linear(inner, self.values(second, dtype, expert))
            out.index_add_(0, tokens, (made * top_k_weights[tokens, choices, None]).to(dtype))
        return out


def expert_weights(module: Any) -> tuple[str, str]:
    """Names of the two parameters of experts."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"


def kind_of(name: str, module: nn.Module, head: nn.Module | None) -> tuple[Role, tuple[str, ...], str]:
    """What a module of a model is to the policy.

    Args:
        name: of the module.
        module: the module.
        head: the model's output head.

    Returns:
        Its role, the names of its parameters that could be quantized (none for a module that is none of the policy's business),
        and what keeps `hold` from taking it, where something does.
    """
    if isinstance(module, nn.Linear):
        role = Role.HEAD if module is head else Role.LINEAR if _ROUTERS.isdisjoint(name.split(".")) else Role.ROUTER
        is_own = type(module).forward is not nn.Linear.forward
        return role, ("weight",), f"{type(module).__name__}, which multiplies in its own way" if is_own else ""
    stacked = tuple(key for key, value in module.named_parameters(recurse=False) if value.ndim > 2)
    if not stacked or isinstance(module, nn.modules.conv._ConvNd):
        return Role.CONVOLUTION, (), ""
    weights = expert_weights(module)
    is_plain = not any(getattr(module, flag, True) for flag in ("is_transposed", "has_bias", "has_post_expert_norm"))
    if is_plain and sorted(stacked) == sorted(weights):
        return Role.EXPERTS, weights, ""
    return Role.EXPERTS, stacked, f"{type(module).__name__} with {', '.join(stacked)}"


def hold(module: nn.Module, weights: Sequence[str]) -> None:
    """Make of a Linear, or of experts, one of the above in place, whose weights are undefined and on the meta device.

    Args:
        module: the module.
        weights: names of the parameters to have in MXFP8, `[..., K]` each.
    """
    for name in weights:
        shape = tuple(getattr(module, name).shape)
        mx = empty(shape, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
        setattr(module, name, nn.Parameter(mx.data, requires_grad=False))
        module.register_parameter(name + SCALE_SUFFIX, nn.Parameter(mx.scale, requires_grad=False))
    own = type(module)
    is_linear = isinstance(module, nn.Linear)
    module.__class__ = QuantizedLinear if is_linear else type(f"Quantized{own.__name__}", (QuantizedExperts, own), {})
