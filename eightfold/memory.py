"""Peak memory of this process over a piece of work.

The kernel's own peak counts pages of mapped files, which cost nothing that cannot be taken back; what counts here is memory
that the process has made its own. It is sampled by a thread, since Linux keeps no peak of it.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_INTERVAL_SECONDS = 0.002


def private_bytes() -> int | None:
    """Memory of this process that no file backs, in bytes; None where the system does not tell (it does on Linux)."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


class PeakMemory:
    """Context manager that records the growth of private memory while it is open.

    Attributes:
        growth: the most that was in use at once beyond what was in use on entry, in bytes; None where it cannot be measured.
    """

    def __init__(self) -> None:
        self.growth: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        gc.collect()  # garbage that went away in the meantime would hide as much growth
        self._before = private_bytes()
        self._peak = self._before or 0
        if self._before is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._before is None:
            return
        self._stop.set()
        self._thread.join()
        self.growth = max(self._peak, private_bytes() or 0) - self._before

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_SECONDS):
            self._peak = max(self._peak, private_bytes() or 0)
