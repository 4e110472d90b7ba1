"""RMS norm as a layer."""

from __future__ import annotations

import torch

from eightfold.layers.norm import RMSNorm
from tests.layers.helpers import fill, kernels


def test_alone_and_after_a_residual_add() -> None:
    norm = RMSNorm("n", 24, 1e-5)
    weight = fill(norm)["n.weight"]
    norm.bind(kernels())
    x, residual = torch.randn(3, 24), torch.randn(3, 24)
    expected_sum = residual + x

    def expected(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(value, (24,), weight, 1e-5)

    assert torch.allclose(norm(x), expected(x), atol=1e-6)
    normed, total = norm.add(x.clone(), residual.clone())
    assert torch.allclose(total, expected_sum)
    assert torch.allclose(normed, expected(expected_sum), atol=1e-6)
