"""What the hub asks of its workers and of whoever counts for it."""

from __future__ import annotations

from typing import Protocol

from convgrad_service.engine.telemetry.record import Record

__all__ = ["Counts", "Prober"]


class Prober(Protocol):
    """A worker, as far as regions on its device go."""

    async def probe(self, handle: bytes, size_bytes: int) -> None:
        """See `ProcessWorker.probe`."""
        ...


class Counts(Protocol):
    """Where requests are counted."""

    def count(self, record: Record) -> None: ...

    def exposition(self) -> bytes: ...
