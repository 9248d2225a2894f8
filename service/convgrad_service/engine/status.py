"""Whether the server is live, ready, and admits requests."""

from __future__ import annotations

from typing import NamedTuple

from convgrad.errors import DeviceUnavailable, Overloaded

__all__ = ["Status"]


class Status(NamedTuple):
    """The state of the engine, of which every front end has a copy.

    Attributes
    ----------
    fault
        Why no device works; None while one does.
    overload
        The error text and Retry-After for new requests while the queue is full.
    missing
        The names of front ends that are not serving.
    dead
        Why the server must be restarted to work again.
    timing
        Whether a timing is running, during which nothing is computed inline.
    slots
        Problems that all workers compute at a time.
    short_of_memory
        Whether requests have waited for memory for a while.
    """

    backend: str
    ready: bool = True
    leaving: bool = False
    draining: bool = False
    fault: str | None = None
    overload: tuple[str, float | None] | None = None
    missing: tuple[str, ...] = ()
    dead: str | None = None
    timing: bool = False
    slots: int = 0
    short_of_memory: bool = False

    def require_live(self) -> None:
        """Raise DeviceUnavailable if the server must be restarted."""
        if self.dead is not None:
            raise DeviceUnavailable(self.dead)

    def require_ready(self) -> None:
        """Raise DeviceUnavailable unless a device works and every front end serves."""
        self.require_live()
        self._require_usable()
        if self.leaving:
            raise DeviceUnavailable("the server is about to shut down", retry_after_s=5.0)
        if not self.ready:
            raise DeviceUnavailable("no device works at the moment", retry_after_s=1.0)
        if self.missing:
            names = ", ".join(self.missing)
            raise DeviceUnavailable(f"{names}: not serving at the moment", retry_after_s=1.0)

    def admit(self) -> None:
        """Raise DeviceUnavailable or Overloaded if a new request would be refused.

        Called before the body is read. A restarting device is not a reason: requests wait for it.
        """
        self._require_usable()
        if self.overload is not None:
            sentence, retry_after_s = self.overload
            raise Overloaded(sentence, retry_after_s=retry_after_s)

    def _require_usable(self) -> None:
        if self.draining:
            raise DeviceUnavailable("the server is shutting down", retry_after_s=5.0)
        if self.fault is not None:
            raise DeviceUnavailable(f"the device has failed: {self.fault}")
