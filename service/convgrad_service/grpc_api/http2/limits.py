"""What one client may do, and for how long nothing may come of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from convgrad_service.grpc_api.http2.frames import Error, Http2Error, Setting, settings

__all__ = [
    "INITIAL_WINDOW",
    "MAX_FRAME_BYTES",
    "Allowance",
    "Limits",
    "Patience",
    "limits_told",
]

INITIAL_WINDOW = 256 * 1024
"""What a client may send on a stream before anybody reads it."""
MAX_FRAME_BYTES = 2**24 - 1
"""Of DATA. It is passed on as it comes, so its size costs no memory, and large frames are few."""


# Ten pings a second and a reset for every call are still far from it.
_BURST, _PER_S = 2000.0, 200.0
# What a client answers to each frame of data that it is sent: pings that measure the way, windows.
_PER_FRAME_SENT = 4.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may pause or dawdle before it is cut off."""

    receive_idle_s: float
    min_bytes_per_s: float
    send_idle_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a connection, and how many of them there may be."""

    patience: Patience
    max_header_bytes: int
    max_connections: int
    max_streams: int
    header_timeout_s: float
    ping_interval_s: float


def limits_told(limits: Limits) -> bytes:
    """The SETTINGS frame that tells a client what it may do."""
    return settings(
        [
            (Setting.MAX_CONCURRENT_STREAMS, limits.max_streams),
            (Setting.INITIAL_WINDOW_SIZE, INITIAL_WINDOW),
            (Setting.MAX_FRAME_SIZE, MAX_FRAME_BYTES),
            (Setting.MAX_HEADER_LIST_SIZE, limits.max_header_bytes),
        ]
    )


class Allowance:
    """How many frames a client may still send that cost us more than they cost it: those that make
    us answer, start or forget something. It grows back with time, and with what we send."""

    def __init__(self) -> None:
        self._left, self._at_s = _BURST, time.monotonic()

    def earn(self) -> None:
        """A frame of data was sent to the client."""
        self._left = min(self._left + _PER_FRAME_SENT, _BURST)

    def spend(self) -> None:
        """Count one; raises Http2Error if it was one too many."""
        now_s = time.monotonic()
        self._left = min(self._left + (now_s - self._at_s) * _PER_S, _BURST) - 1
        self._at_s = now_s
        if self._left < 0:
            raise Http2Error(Error.ENHANCE_YOUR_CALM, "too many control frames")
