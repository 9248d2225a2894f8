"""What one client may do, and for how long nothing may come of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from convgrad_service.grpc_api.http2.frames import Error, Http2Error

__all__ = ["Allowance", "Limits", "Patience"]

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
