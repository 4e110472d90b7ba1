"""Where weights live. On a CPU that is memory in huge pages, where the system has them.

Decode reads every weight once for each token. In pages of 4 KiB a good part of that time goes into finding out where pages are;
in pages of 2 MiB it does not. A page of that size needs a region that is large and aligned, which no single weight of a small
model is, so weights share slabs. A slab's untouched rest costs no memory.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_SLAB_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
# Vector loads of a weight's first element do not straddle a cache line.
_ALIGNMENT = 64


class Arena:
    """Memory for the weights of one model on one device. It is freed when the last tensor in it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor whose contents are undefined."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if self.device.type != "cpu" or nbytes == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype, device=self.device)
        if nbytes > _SLAB_BYTES // 4:
            return _region(nbytes)[:nbytes].view(dtype).view(shape)  # its own, so that it does not cut a slab short
        if self._used + nbytes > self._slab.numel():
            self._slab, self._used = _region(_SLAB_BYTES), 0
        start = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return self._slab[start : start + nbytes].view(dtype).view(shape)


def _region(nbytes: int) -> Tensor:
    """At least `nbytes` bytes of private memory, beginning at a huge page, `uint8`."""
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    return whole[-whole.data_ptr() % _HUGE_PAGE_BYTES :]
