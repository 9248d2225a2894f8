"""Survive the truncation of mapped files: see ``kernels/shared_region.cpp``."""

from __future__ import annotations

import ctypes
import functools
import os

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cpu.library import load

__all__ = ["Guard"]


class Guard:
    """From construction until `remove`, a missing page of the range reads as zeros."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """Guard ``size_bytes`` from ``address``, which is page-aligned.

        Raises
        ------
        DeviceUnavailable
            This system does not support guards, or all guards are in use.
        """
        self._functions = _functions()
        self._number = self._functions.convgrad_guard_add(address, size_bytes)
        if self._number < 0:
            raise DeviceUnavailable("the maximum number of shared-memory regions is mapped")

    def lost(self) -> int | None:
        """Return the offset of the first missing page that was accessed, or None."""
        offset = self._functions.convgrad_guard_lost(self._number)
        return None if offset < 0 else offset

    def remove(self) -> None:
        """Remove the guard. Call it once; the range must not be accessed afterwards."""
        self._functions.convgrad_guard_remove(self._number)


@functools.cache
def _functions() -> ctypes.CDLL:
    handle = load().handle
    handle.convgrad_guard_install.argtypes = ()
    handle.convgrad_guard_install.restype = ctypes.c_int
    handle.convgrad_guard_add.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    handle.convgrad_guard_lost.argtypes = (ctypes.c_int64,)
    handle.convgrad_guard_remove.argtypes = (ctypes.c_int64,)
    handle.convgrad_guard_add.restype = handle.convgrad_guard_lost.restype = ctypes.c_int64
    handle.convgrad_guard_remove.restype = None
    if (number := handle.convgrad_guard_install()) != 0:
        raise DeviceUnavailable(f"SIGBUS cannot be handled: {os.strerror(number)}")
    return handle
