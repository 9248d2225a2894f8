"""The configuration of an engine, and limits on the size of a problem."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad_service.engine.memory.arena import FreeList

__all__ = ["MAX_TRANSFER_S", "SMALL_REQUEST_BYTES", "EngineOptions"]

SMALL_REQUEST_BYTES = 64 * 1024
"""Requests whose tensors take at most this may use the arena's reserve."""
MAX_TRANSFER_S = 60.0
"""While others wait for memory, a body or an answer that would take longer than this at its rate so
far is ended: otherwise a few slow clients could hold all of the memory for hours."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The configuration of an engine.

    Attributes
    ----------
    tensor_bytes, text_bytes
        The sizes of the arena's parts for tensors and for JSON bodies.
    reserve_bytes
        The size of its third part, for the tensors of small requests while those of other requests
        fill the first: see `SMALL_REQUEST_BYTES`.
    keep_bytes
        The first bytes of each part that stay resident once used; None for all.
    wait_s
        How long a request may wait for memory.
    slots
        Jobs that a worker computes at a time; None for the backend's default.
    large_s
        Expected seconds from which a problem counts as large.
    stored_bytes, stored_longest_s
        The budget for stored tensors, and the longest time to live.
    heartbeat_timeout_s
        A worker that is silent for this long is killed.
    progress_timeout_s
        A worker without progress on a job for this long is killed.
    device_timeout_s
        The server is no longer live if no device has worked for this long.
    """

    tensor_bytes: int
    text_bytes: int
    reserve_bytes: int = 0
    keep_bytes: int | None = None
    wait_s: float = 5.0
    slots: int | None = None
    max_queue: int = 64
    large_s: float = 1.0
    max_regions: int = 256
    stored_bytes: int = 2**30
    stored_longest_s: float = 3600.0
    heartbeat_timeout_s: float = 10.0
    progress_timeout_s: float = 60.0
    device_timeout_s: float = 300.0

    @property
    def arena_bytes(self) -> int:
        """The size of all parts, in whole pages."""
        parts = (self.text_bytes, self.tensor_bytes, self.reserve_bytes)
        return sum(FreeList.rounded(size) for size in parts if size)
