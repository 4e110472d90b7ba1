"""Root mean square normalisation."""

from __future__ import annotations

from torch import Tensor

from eightfold.kernels.operations import FusedBackend
from eightfold.kernels.selection import Kernels
from eightfold.layers.module import Module
from eightfold.layers.weight import Weight
from eightfold.quant.policy import Role


class RMSNorm(Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension (arXiv 1910.07467), alone or after a residual add."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        self.eps = eps
        self.source = Weight(f"{name}.weight", Role.NORM, {f"{name}.weight": width})
        self._fused: FusedBackend
        self._weight: Tensor

    def bind(self, kernels: Kernels) -> None:
        """Take the weight and the backend."""
        self._fused = kernels.fused().backend
        self._weight = self.source.take_dense()

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x `[..., width]`."""
        return self._fused.rms_norm(x, self._weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x), each `[T, width]`. The old residual must not be used afterwards."""
        return self._fused.add_rms_norm(x, residual, self._weight, self.eps)
