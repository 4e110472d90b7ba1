"""How a result is compared with its oracle, which takes the operands that the code under test got.

A cosine does not see a factor, and a bound wide enough for the format's error lets most faults through. So the bounds here are
for accumulation and rounding alone, on the norm and on the worst element; tests/test_oracle.py plants faults under each.
"""

from __future__ import annotations

from torch import Tensor

from tests.tolerances import Tolerance

# Of a few elements all may be small by cancellation, so that their norm is no measure.
FEWEST_FOR_NORM = 100


def assert_matches(actual: Tensor, expected: Tensor, tolerance: Tolerance, magnitude: Tensor | None = None) -> None:
    """Fail unless `actual` is `expected` within `tolerance`; the arguments are those of `mismatch`."""
    reason = mismatch(actual, expected, tolerance, magnitude)
    assert reason is None, reason


def mismatch(actual: Tensor, expected: Tensor, tolerance: Tolerance, magnitude: Tensor | None = None) -> str | None:
    """Why `actual` is not `expected` within `tolerance`, with how far off it is and where; None where it is.

    Args:
        actual: what the code under test made, in a dtype that the tolerance is for.
        expected: the exact result, of the same shape; best in fp64.
        tolerance: an entry of `tests.tolerances`.
        magnitude: for each element the sum of the magnitudes that went into it; the largest result where there is none.
    """
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if tolerance.dtypes and actual.dtype not in tolerance.dtypes:
        return f"{tolerance.name}: dtype {actual.dtype}, expected one of {tolerance.dtypes}"
    return _values_off(actual, expected, tolerance, magnitude) if expected.numel() else None


def _values_off(actual: Tensor, expected: Tensor, tolerance: Tolerance, magnitude: Tensor | None) -> str | None:
    found, exact = actual.detach().double().cpu(), expected.detach().double().cpu()
    for tensor, name in ((exact, "the oracle"), (found, "the result")):
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite at {_first(~tensor.isfinite())}"
    error, size = (found - exact).abs(), exact.abs()
    terms = size.amax() if magnitude is None else magnitude.double().cpu()
    over = error > tolerance.accumulation * terms + tolerance.rounding * size
    if bool(over.any()):
        index = _first(over)
        return f"{tolerance.name}: got {found[index]:.8g} at {index}, expected {exact[index]:.8g}"
    norm, bound = float(error.norm()), tolerance.relative_norm * float(size.norm())
    if found.numel() >= FEWEST_FOR_NORM and norm > bound:
        return f"{tolerance.name}: error of norm {norm:.3g}, at most {bound:.3g}"
    return None


def product(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The fp64 product x Wᵀ, and the sum of magnitudes behind each element."""
    x, weight = x.double(), weight.double()
    return x @ weight.T, x.abs() @ weight.abs().T


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in where.nonzero()[0])
