"""The oracle for kernels: a result against the fp64 one of the operands that the kernel got."""

from __future__ import annotations

from torch import Tensor

from tests.tolerances import KERNEL_TOLERANCES

# Of a few elements all may be small by cancellation, so that their norm is no measure.
FEWEST_FOR_NORM = 100


def matches(found: Tensor, expected: Tensor, magnitude: Tensor | None = None) -> bool:
    """Whether a result is the exact one up to accumulation and rounding, by its worst element and by its norm.

    Args:
        found: what the kernel gave; its dtype decides the tolerance.
        expected: the exact result, of the same shape.
        magnitude: for each element the sum of the magnitudes that went into it; the largest result where there is none.
    """
    tolerance = KERNEL_TOLERANCES[found.dtype]
    if found.shape != expected.shape or bool(found.isnan().any()):
        return False
    error, size = (found.double() - expected.double()).abs(), expected.double().abs()
    within = tolerance.accumulation * (size.amax() if magnitude is None else magnitude) + tolerance.rounding * size
    worst = bool((error <= within).all())
    relative_norm = tolerance.accumulation + tolerance.rounding
    return worst and (found.numel() < FEWEST_FOR_NORM or float(error.norm()) <= relative_norm * float(size.norm()))


def product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The fp64 product x Wᵀ, and the sum of magnitudes behind each element."""
    x, weight = x.double(), weight.double()
    return x @ weight.T, x.abs() @ weight.abs().T
