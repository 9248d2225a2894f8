"""glibc takes the tuning of malloc; in a process of its own, for it cannot be undone."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# A body is allocated by the event loop's thread, its arrays by another.
FREED_PAGES_STAY = """
import resource, threading
from convgrad_service.server.malloc import keep_large_blocks

def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytes(b"x" * (80 * 2**20))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def in_a_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(faults_of_a_block()))
    thread.start()
    thread.join()
    return seen[0]

assert keep_large_blocks(2**30)
print(faults_of_a_block(), faults_of_a_block(), in_a_thread(), in_a_thread())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_a_freed_block_serves_the_next_body() -> None:
    done = subprocess.run([sys.executable, "-c", FREED_PAGES_STAY], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    first, *later = map(int, done.stdout.split())
    assert first > 1000
    assert max(later) < 1000, later
