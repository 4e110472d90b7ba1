"""Dense products: one or more projections of the same input, fused along their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eightfold.kernels.operations import LinearBackend, LinearSpec
from eightfold.kernels.registry import Choice
from eightfold.kernels.selection import Kernels
from eightfold.layers.module import Module
from eightfold.layers.weight import Weight
from eightfold.quant.mxfp8 import MXTensor
from eightfold.quant.policy import Role


class Linear(Module):
    """y = x Wᵀ + b, where W stacks the projections of `parts`.

    Args:
        name: what this layer is called in errors and reports, such as "model.layers.0.self_attn.qkv_proj".
        in_features: K.
        parts: the checkpoint's layer names to their numbers of outputs, in the order of the outputs.
        bias: whether the checkpoint has a bias beside each weight.
        role: `Role.HEAD` for the output head, which the policy treats apart.
    """

    def __init__(
        self, name: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, role: Role = Role.LINEAR
    ) -> None:
        self.name = name
        self.weight = Weight(f"{name}.weight", role, {f"{part}.weight": rows for part, rows in parts.items()}, in_features)
        self.bias = Weight(f"{name}.bias", Role.BIAS, {f"{part}.bias": rows for part, rows in parts.items()}) if bias else None
        self._backend: LinearBackend
        self._prepared: Any
        self.choice: Choice[LinearBackend] | None = None

    def spec(self, kernels: Kernels, weight_format: str, weight: MXTensor | None = None) -> LinearSpec:
        """What a backend is asked about, for a weight in this format ("mxfp8" or the name of a dtype)."""
        out_features, in_features = self.weight.shape
        return LinearSpec(self.name, out_features, in_features, weight_format, kernels.activation_dtype, weight)

    def bind(self, kernels: Kernels) -> None:
        """Choose a backend for the weight as it was loaded, and hand the weight over to it."""
        weight = self.weight.take()
        self.bind_to(kernels, weight, None if self.bias is None else self.bias.take_dense())

    def bind_to(self, kernels: Kernels, weight: MXTensor | Tensor, bias: Tensor | None) -> None:
        """`bind()` with a weight `[N, K]` that comes from elsewhere: a tied embedding."""
        if isinstance(weight, MXTensor):
            self.choice = kernels.linear(self.spec(kernels, "mxfp8", weight))
        else:
            self.choice = kernels.linear(self.spec(kernels, str(weight.dtype).removeprefix("torch.")))
        self._backend = self.choice.backend
        self._prepared = self._backend.prepare(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """y `[M, N]` from x `[M, K]`."""
        return self._backend.run(x, self._prepared)
