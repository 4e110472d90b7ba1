"""What `tests/conftest.py` promises: fresh memory is poisoned, and warnings are errors."""

from __future__ import annotations

import warnings

import pytest
import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)
WHOLE = (torch.uint8, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fresh_floats_are_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(2, 3, dtype=dtype)
    for made in (torch.empty(2, 3, dtype=dtype), torch.empty_like(like), torch.empty_like(like.T), like.new_empty((2, 3))):
        assert made.dtype is dtype
        assert bool(made.float().isnan().all())
    assert not like.float().any()


@pytest.mark.parametrize("dtype", WHOLE)
def test_fresh_whole_numbers_are_no_index(dtype: torch.dtype) -> None:
    assert bool((torch.empty(5, dtype=dtype) == torch.iinfo(dtype).max).all())


def test_warnings_are_errors() -> None:
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn("planted", stacklevel=1)
