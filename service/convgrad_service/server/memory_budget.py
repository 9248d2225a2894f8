"""Divides the memory that the server may use: its container's limit, or the host's memory.

A server that exceeds its limit is killed with all its requests; one that stays within its budget
lets requests wait, or refuses them.
"""

from __future__ import annotations

from typing import NamedTuple

from convgrad_service.cgroups import memory_bytes
from convgrad_service.server.settings import Settings

__all__ = ["MemoryBudget", "memory_budget"]

# Assumed if the system does not report its memory.
_UNKNOWN_BYTES = 8 * 2**30
# Used by the interpreters, libraries and threads of a server's processes, and kept by malloc.
_PROCESSES_BYTES = 384 * 2**20
# Number of JSON bodies of the maximum size that may be in memory at the same time.
_MAX_SIZE_TEXTS = 4


class MemoryBudget(NamedTuple):
    """Bytes for tensors of requests in flight, JSON bodies not yet decoded, stored tensors, and the
    workspace of one problem."""

    tensors: int
    texts: int
    stored: int
    workspace: int


def memory_budget(settings: Settings) -> MemoryBudget:
    """Return the budget from the settings; what they leave unset is a share of `memory_bytes`.

    After subtracting what the processes themselves need, half is for tensors, and an eighth each
    for JSON texts, stored tensors and the workspace of each of two problems.
    """
    limit = settings.memory_bytes or memory_bytes() or _UNKNOWN_BYTES
    free = max(limit - _PROCESSES_BYTES, limit // 4)
    tensors = int(settings.max_inflight_bytes or free // 2)
    texts = max(
        min(_MAX_SIZE_TEXTS * settings.max_json_bytes, tensors // 4), settings.max_json_bytes
    )

    def capped_unless_set(name: str, size_bytes: int) -> int:
        return int(size_bytes) if name in settings.model_fields_set else min(size_bytes, free // 8)

    return MemoryBudget(
        tensors,
        capped_unless_set("max_json_bytes", texts),
        capped_unless_set("max_stored_bytes", settings.max_stored_bytes),
        capped_unless_set("workspace_bytes", settings.workspace_bytes),
    )
