"""glibc takes the tuning of malloc; in a process of its own, for it cannot be undone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FREED_PAGES_STAY = """
import numpy as np
from pathlib import Path
from convgrad_service.malloc import keep_large_blocks

def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

assert keep_large_blocks(2**30)
np.ones(64 * 2**20, np.uint8)
kept = resident_pages()
assert kept * 4096 > 64 * 2**20, kept
np.ones(64 * 2**20, np.uint8)
assert abs(resident_pages() - kept) < 1000
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_a_freed_block_serves_the_next_body() -> None:
    done = subprocess.run([sys.executable, "-c", FREED_PAGES_STAY], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
