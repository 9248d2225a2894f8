"""How a server divides the memory that it may use: its container's limit, or the host's memory.

A server that took more would be killed by the system, with every request in it; one that keeps to
its budget refuses a request, or has it wait.
"""

from __future__ import annotations

from typing import NamedTuple

from convgrad_service.cgroups import memory_bytes
from convgrad_service.server.settings import Settings

__all__ = ["MemoryBudget", "memory_budget"]

# Of a system that does not say how much there is.
_UNKNOWN_BYTES = 8 * 2**30
# What the interpreters, libraries and threads of a server's processes take, and what malloc keeps.
_PROCESSES_BYTES = 384 * 2**20
# JSON bodies that may be in memory at the same time, if each were as long as may be.
_LONG_TEXTS = 4


class MemoryBudget(NamedTuple):
    """In bytes: for tensors of requests in flight, JSON bodies that are not decoded yet, stored
    tensors, and the workspace of one problem."""

    tensors: int
    texts: int
    stored: int
    workspace: int


def memory_budget(settings: Settings, limit_bytes: int | None = None) -> MemoryBudget:
    """What the settings say; where they say nothing, what fits into ``limit_bytes``, by default all
    that there is.

    Beside what processes take, half is for tensors, and an eighth each for texts, stored tensors
    and the workspace of each of two problems.
    """
    limit = limit_bytes or memory_bytes() or _UNKNOWN_BYTES
    free = max(limit - _PROCESSES_BYTES, limit // 4)
    tensors = int(settings.max_inflight_bytes or free // 2)
    texts = max(min(_LONG_TEXTS * settings.max_json_bytes, tensors // 4), settings.max_json_bytes)

    def given_or_fitting(name: str, size_bytes: int) -> int:
        return int(size_bytes) if name in settings.model_fields_set else min(size_bytes, free // 8)

    return MemoryBudget(
        tensors,
        given_or_fitting("max_json_bytes", texts),
        given_or_fitting("max_stored_bytes", settings.max_stored_bytes),
        given_or_fitting("workspace_bytes", settings.workspace_bytes),
    )
