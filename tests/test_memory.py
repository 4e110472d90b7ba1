"""The peak that benchmarks and the demo report."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import time

import pytest

from eightfold.memory import PeakMemory, private_bytes

MEGABYTE = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")


# In a process of its own: what the other tests leave to be freed at any time would hide as much growth.
TEMPORARY = """
import time
from eightfold.memory import PeakMemory

with PeakMemory() as peak:
    block = bytearray(b"x") * (64 << 20)
    time.sleep(0.2)
    del block
print(peak.growth)
"""


def test_a_temporary_counts_although_it_is_gone_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", TEMPORARY], check=True, capture_output=True, text=True)
    assert 60 * MEGABYTE < int(done.stdout) < 90 * MEGABYTE


def test_pages_of_a_mapped_file_do_not_count() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * (64 * MEGABYTE))
        file.flush()
        with PeakMemory() as peak, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            total = sum(mapped[offset] for offset in range(0, len(mapped), 4096))
            time.sleep(0.05)
    assert total > 0
    assert peak.growth is not None
    assert peak.growth < 20 * MEGABYTE


def test_private_bytes_is_a_size() -> None:
    found = private_bytes()
    assert found is not None
    assert found > MEGABYTE
