"""Shared memory that a client owns and a server on the same machine reads and writes.

Each region is a file in /dev/shm that is unlinked as soon as the server has opened it, so nothing
is left behind however either process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad._exchange import Requests, Target
from convgrad.errors import ClientError, ConvgradError

__all__ = ["ALIGNMENT_BYTES", "Region", "RegionPool"]

ALIGNMENT_BYTES = 64
"""Tensors begin at multiples of this, so the server can use them without a copy."""

_FOLDER = Path("/dev/shm")  # noqa: S108 - what shm_open's names mean on Linux
_STEP_BYTES = 1 << 16
# Most idle regions kept for later calls.
_MOST_IDLE = 8
# Most regions that hold results; a server accepts no more.
_MOST_IN_USE = 64


class Region:
    """A mapped file; ``name`` identifies it on the server."""

    def __init__(self, size_bytes: int) -> None:
        self.name = f"convgrad-{os.getpid()}-{secrets.token_hex(8)}"
        self.size_bytes = size_bytes
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(_FOLDER / self.name, flags, 0o600)
        except OSError as error:
            raise _no_memory(size_bytes, error) from error
        try:
            # Held for the life of this process, so that the server can detect orphaned regions.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Allocated now, so that a lack of memory is an error here and not SIGBUS later.
            os.posix_fallocate(descriptor, 0, size_bytes)
            memory = mmap.mmap(descriptor, size_bytes)
        except OSError as error:
            os.close(descriptor)
            self.remove_name()
            raise _no_memory(size_bytes, error) from error
        weakref.finalize(self, os.close, descriptor)
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.start = int(self.bytes.ctypes.data)

    def remove_name(self) -> None:
        """Unlink the file; processes that have opened it keep their access."""
        (_FOLDER / self.name).unlink(missing_ok=True)


class RegionPool:
    """The regions of a client. Thread-safe.

    ``register`` and ``unregister`` make the requests by which the server opens and forgets a
    region; the caller sends what the methods yield.
    """

    def __init__(
        self, register: Callable[[Region], Target[None]], unregister: Callable[[str], Target[None]]
    ) -> None:
        self._register, self._unregister = register, unregister
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._by_start: list[tuple[int, str]] = []
        self._idle: list[Region] = []
        self._dropped: list[str] = []
        # Filled by finalizers, which may run at any point and must not take a lock.
        self._returned: deque[Region] = deque()

    @property
    def is_full(self) -> bool:
        """Return whether too many regions are in use, so that results should be copied out."""
        with self._lock:
            self._collect()
            return len(self._regions) - len(self._idle) >= _MOST_IN_USE

    def take(self, size_bytes: int) -> Requests[Region]:
        """Return a region of at least that size, for exclusive use.

        Raises
        ------
        ClientError
            The memory cannot be allocated. Errors of the registration propagate.
        """
        with self._lock:
            self._collect()
            found = self._fitting(size_bytes)
            over: list[str] = []
            if len(self._dropped) > _MOST_IDLE:
                over, self._dropped = self._dropped, []
        yield from self._unregister_all(over)
        return found or (yield from self._made(-(-size_bytes // _STEP_BYTES) * _STEP_BYTES))

    def give(self, region: Region) -> None:
        """Return a region to the pool."""
        self._returned.append(region)

    def drop(self, region: Region) -> None:
        """Discard a region that the server may still be using."""
        with self._lock:
            self._remove(region)

    def lend(self, region: Region) -> NDArray[np.uint8]:
        """Return a region's bytes; the region returns to the pool when their last view is freed."""
        # Not a view of region.bytes: views of that would outlive this array.
        owner = np.frombuffer(region.bytes.data, np.uint8)
        weakref.finalize(owner, self.give, region).atexit = False
        return owner

    def place_of(self, array: NDArray[Any]) -> tuple[str, int] | None:
        """Return the region and offset of an array, or None if it is not in a region."""
        address = int(array.ctypes.data)
        with self._lock:
            index = bisect_right(self._by_start, (address, "\U0010ffff")) - 1
            if index < 0:
                return None
            region = self._regions[self._by_start[index][1]]
        offset = address - region.start
        return (region.name, offset) if offset + array.nbytes <= region.size_bytes else None

    def forget_all(self) -> None:
        """Discard all regions because the server lost them; arrays in them remain valid."""
        with self._lock:
            for names in (self._regions, self._by_start, self._idle, self._dropped):
                names.clear()

    def close(self) -> Requests[None]:
        """Unregister all regions."""
        with self._lock:
            names = [*self._dropped, *self._regions]
        self.forget_all()
        yield from self._unregister_all(names)

    def _collect(self) -> None:
        while self._returned:
            region = self._returned.popleft()
            if self._regions.get(region.name) is region:
                self._idle.append(region)
        while len(self._idle) > _MOST_IDLE:
            self._remove(self._idle.pop(0))

    def _fitting(self, size_bytes: int) -> Region | None:
        # Keep regions that are much too large for calls that need them.
        most = 2 * max(size_bytes, _STEP_BYTES)
        fitting = [each for each in self._idle if size_bytes <= each.size_bytes <= most]
        best = min(fitting, key=lambda each: each.size_bytes, default=None)
        if best is not None:
            self._idle.remove(best)
        return best

    def _remove(self, region: Region) -> None:
        if self._regions.pop(region.name, None) is not None:
            self._by_start.remove((region.start, region.name))
            self._dropped.append(region.name)

    def _made(self, size_bytes: int) -> Requests[Region]:
        region = Region(size_bytes)
        try:
            yield self._register(region)
        finally:
            region.remove_name()
        with self._lock:
            self._regions[region.name] = region
            insort(self._by_start, (region.start, region.name))
        return region

    def _unregister_all(self, names: list[str]) -> Requests[None]:
        for name in names:
            # An unreachable server forgets them when it detects that their owner is gone.
            with contextlib.suppress(ConvgradError):
                yield self._unregister(name)


def _no_memory(size_bytes: int, error: OSError) -> ClientError:
    return ClientError(
        f"cannot allocate {size_bytes:,} bytes of shared memory in {_FOLDER}: {error.strerror}; "
        'transport="http" needs none'
    )
