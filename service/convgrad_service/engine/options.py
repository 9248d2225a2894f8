"""The configuration of an engine, and limits on the size of a problem."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.memory.arena import FreeList

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


class InlineBackend(NamedTuple):
    """The backend for inline execution, used if the workers' backend has the same ``name``.

    ``make`` should return one that starts no threads: waking one takes longer than computing.
    """

    name: str
    make: Callable[[], ServingBackend]


class WorkerRecipe(NamedTuple):
    """How to start a worker.

    Attributes
    ----------
    make_backend
        Called in the worker with its device's number.
    slots
        Jobs at a time; None for the backend's default.
    prepare
        Called in the worker first.
    inline_backend
        What front ends may compute small problems with.
    warm_up
        Called with the backend of each device's first worker before it is ready; may take long.
    """

    make_backend: Callable[[int], ServingBackend]
    slots: int | None = None
    prepare: Callable[[], None] = gc.enable  # a picklable no-op: it is enabled anyway
    inline_backend: InlineBackend | None = None
    warm_up: Callable[[ServingBackend], None] | None = None
