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

# A small block at the end of the heap keeps malloc from shrinking it. No descriptor is free.
PAGES_BELOW_A_BLOCK = """
import os, resource, time
from convgrad_service.server.malloc import keep_large_blocks

statm = os.open("/proc/self/statm", os.O_RDONLY)

def resident_mib():
    resident, shared = map(int, os.pread(statm, 256, 0).split()[1:3])
    return (resident - shared) // 256

assert keep_large_blocks(32 * 2**20, check_s=0.02)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
before = resident_mib()
print(before)
for mib in (24, 128):
    freed = bytearray(b"x") * (mib * 2**20)
    at_the_end = bytearray(b"x") * 2**20
    print(resident_mib())
    del freed
    end = time.monotonic() + (0.3 if mib < 32 else 10)
    while time.monotonic() < end and (mib < 32 or resident_mib() > before + 32):
        time.sleep(0.02)
    print(resident_mib())
resource.setrlimit(resource.RLIMIT_NOFILE, limits)  # for the end of the process
"""


def numbers_printed(code: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return list(map(int, done.stdout.split()))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_a_freed_block_serves_the_next_body() -> None:
    first, *later = numbers_printed(FREED_PAGES_STAY)
    assert first > 1000
    assert max(later) < 1000, later


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_no_more_than_the_limit_stays_unused() -> None:
    before, in_use, kept, above, after = numbers_printed(PAGES_BELOW_A_BLOCK)
    assert in_use >= before + 24
    assert kept >= before + 24
    assert above >= before + 128
    assert after <= before + 32
