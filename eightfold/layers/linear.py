"""Dense products: one or more projections of the same input, fused along their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from eightfold.kernels.operations import LinearBackend, LinearSpec, LowLatencyBackend
from eightfold.kernels.selection import Kernels
from eightfold.layers.module import Chosen, FormatOf, Module
from eightfold.layers.weight import Weight
from eightfold.quant.fp8 import FP8Tensor, WeightTensor
from eightfold.quant.mxfp8 import MXTensor
from eightfold.quant.policy import Role


class Linear(Module):
    """y = x Wᵀ + b, where W stacks the projections of `parts`.

    Args:
        name: what this layer is called in errors and reports, such as "model.layers.0.self_attn.qkv_proj".
        in_features: K.
        parts: the checkpoint's layer names to their numbers of outputs, in the order of the outputs.
        bias: whether the checkpoint has a bias beside each weight.
        role: `Role.HEAD` for the output head and `Role.ROUTER` for gates, which the policy treats apart.
    """

    def __init__(
        self, name: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, role: Role = Role.LINEAR
    ) -> None:
        self.name = name
        self.weight = Weight(f"{name}.weight", role, {f"{part}.weight": rows for part, rows in parts.items()}, in_features)
        self.bias = Weight(f"{name}.bias", Role.BIAS, {f"{part}.bias": rows for part, rows in parts.items()}) if bias else None
        self._backend: LinearBackend
        self._prepared: Any

    def choose(self, kernels: Kernels, format_of: FormatOf) -> Iterator[Chosen]:
        """The product's backend."""
        yield self._chosen(kernels, format_of(self.weight))

    def bind(self, kernels: Kernels) -> None:
        """Choose a backend for the weight as it was loaded, and hand the weight over to it."""
        weight = self.weight.take()
        self.bind_to(kernels, weight, None if self.bias is None else self.bias.take_dense())

    def bind_to(self, kernels: Kernels, weight: WeightTensor, bias: Tensor | None) -> None:
        """`bind()` with a weight `[N, K]` that comes from elsewhere: a tied embedding."""
        chosen = self._chosen(kernels, weight_format(weight), weight if isinstance(weight, MXTensor) else None)
        self.chosen = (chosen,)
        self._backend = chosen.choice.backend
        self._prepared = self._backend.prepare(weight, bias)

    def release(self) -> None:
        """Let go of the weight, where the backend has a layout of its own."""
        if not self.weight.in_use:
            self._prepared = None

    def __call__(self, x: Tensor) -> Tensor:
        """y `[M, N]` from x `[M, K]`."""
        return self._backend.run(x, self._prepared)

    def _spec(self, kernels: Kernels, weight_format: str, weight: MXTensor | None) -> LinearSpec:
        out_features, in_features = self.weight.shape
        return LinearSpec(self.name, out_features, in_features, weight_format, kernels.activation_dtype, weight)

    def _chosen(self, kernels: Kernels, weight_format: str, weight: MXTensor | None = None) -> Chosen:
        choice = kernels.linear(self._spec(kernels, weight_format, weight))
        return Chosen(f"linear {weight_format}", self.name, choice, (self.weight,))


class LowLatencyLinear(Linear):
    """A product that stands alone on the way of a single token, such as a latent projection before the experts.

    Where a backend for few tokens takes the weight as it has become, small batches go there. That is settled when loading has
    ended, and again after every reload: decided in a constructor, it would look at a weight that is about to be quantized.
    """

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(name, in_features, {name: out_features}, bias=bias)
        self._low_latency: LowLatencyBackend
        self._low_latency_prepared: Any

    def choose(self, kernels: Kernels, format_of: FormatOf) -> Iterator[Chosen]:
        """The backends of the general product, and of the one for few tokens."""
        yield from super().choose(kernels, format_of)
        yield self._chosen_low_latency(kernels, format_of(self.weight))

    def bind_to(self, kernels: Kernels, weight: WeightTensor, bias: Tensor | None) -> None:
        """Choose both backends."""
        super().bind_to(kernels, weight, bias)
        chosen = self._chosen_low_latency(kernels, weight_format(weight), weight if isinstance(weight, MXTensor) else None)
        self.chosen = (*self.chosen, chosen)
        self._low_latency = chosen.choice.backend
        self._low_latency_prepared = self._low_latency.prepare(weight, bias) if self._low_latency.max_tokens else None

    def release(self) -> None:
        """Let go of both layouts."""
        super().release()
        if not self.weight.in_use:
            self._low_latency_prepared = None

    def __call__(self, x: Tensor) -> Tensor:
        """y `[M, N]` from x `[M, K]`."""
        if x.shape[0] <= self._low_latency.max_tokens:
            return self._low_latency.run(x, self._low_latency_prepared)
        return super().__call__(x)

    def _chosen_low_latency(self, kernels: Kernels, weight_format: str, weight: MXTensor | None = None) -> Chosen:
        choice = kernels.low_latency(self._spec(kernels, weight_format, weight))
        return Chosen(f"low latency {weight_format}", self.name, choice, (self.weight,))


def weight_format(weight: WeightTensor) -> str:
    """ "mxfp8", "fp8", or the name of a dtype."""
    match weight:
        case MXTensor():
            return "mxfp8"
        case FP8Tensor():
            return "fp8"
    return dtype_name(weight.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, without torch."""
    return str(dtype).removeprefix("torch.")
