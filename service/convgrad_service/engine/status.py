"""Whether the server is live, ready, and takes requests: what health checks and admission ask."""

from __future__ import annotations

from typing import NamedTuple

from convgrad.errors import DeviceUnavailable, Overloaded

__all__ = ["Status"]


class Status(NamedTuple):
    """What every front end knows of the engine at any moment, without asking."""

    backend: str
    ready: bool = True
    leaving: bool = False
    draining: bool = False
    fault: str | None = None
    overload: tuple[str, float | None] | None = None
    missing: tuple[str, ...] = ()
    """Front ends that do not serve at the moment."""
    dead: str | None = None
    """Why nothing is going to work again unless the whole server is started anew."""
    timing: bool = False
    """Whether something is timed, beside which nothing is to be computed."""

    def require_live(self) -> None:
        """Raise DeviceUnavailable once the server had better be started anew."""
        if self.dead is not None:
            raise DeviceUnavailable(self.dead)

    def require_ready(self) -> None:
        """Raise DeviceUnavailable unless some device works, and every front end serves."""
        self.require_live()
        self.require_hope()
        if self.leaving:
            raise DeviceUnavailable("the server is about to shut down", retry_after_s=5.0)
        if not self.ready:
            raise DeviceUnavailable("no device works at the moment", retry_after_s=1.0)
        if self.missing:
            names = ", ".join(self.missing)
            raise DeviceUnavailable(f"{names}: not serving at the moment", retry_after_s=1.0)

    def require_hope(self) -> None:
        """Raise DeviceUnavailable if a new request could never be answered.

        A device that is starting again is no reason: its requests wait for it.
        """
        if self.draining:
            raise DeviceUnavailable("the server is shutting down", retry_after_s=5.0)
        if self.fault is not None:
            raise DeviceUnavailable(f"the device has failed: {self.fault}")

    def admit(self) -> None:
        """Refuse, before its body is read, a request that could not be queued now."""
        self.require_hope()
        if self.overload is not None:
            sentence, retry_after_s = self.overload
            raise Overloaded(sentence, retry_after_s=retry_after_s)
