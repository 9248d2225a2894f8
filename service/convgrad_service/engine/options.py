"""What an engine is made with, whatever processes it is made of."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad_service.engine.memory.free_list import FreeList

__all__ = ["EngineOptions"]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``tensor_bytes`` and ``text_bytes`` are the arena's two parts, for tensors and for JSON
    bodies; of each, the first ``keep_bytes`` stay with the server once they were used, the rest
    goes back to the system (None: nothing does). ``wait_s`` is how long a request may wait for its
    place in it. ``slots`` are the jobs that one worker computes at a time (None: as many as
    its backend likes). ``max_regions`` of shared memory may be registered. Stored tensors may take
    ``stored_bytes``, each for ``stored_longest_s`` since it was last used. A worker's process is
    ended that is silent for ``heartbeat_timeout_s``, or makes no progress with a problem for
    ``progress_timeout_s``; when no device has worked for ``device_timeout_s``, the server is not
    live any more.
    """

    tensor_bytes: int
    text_bytes: int
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
        """Both parts, in whole pages."""
        return FreeList.rounded(self.text_bytes) + FreeList.rounded(self.tensor_bytes)
