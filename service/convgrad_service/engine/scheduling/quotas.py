"""What one API key may have: requests and bytes in flight, requests and FLOPs a second.

Counted once, in the hub, however many front ends and transports a key comes through. The limits
themselves come with each request, from whoever read the file of keys; what exceeds them is refused
at once and not queued, so that one key's excess takes no place from another's work.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from convgrad.errors import Overloaded, ProblemTooLarge

__all__ = [
    "ANYBODY",
    "NO_LIMITS",
    "Caller",
    "Entered",
    "KeyLimits",
    "Quotas",
    "Ticket",
    "Usage",
    "entered",
]

# When another of its requests will have ended only the caller can know; a second is what the
# SDK's first retries would wait anyway.
_RETRY_AFTER_S = 1.0


class KeyLimits(NamedTuple):
    """The most that one key may have; None means no limit.

    ``inflight_bytes`` counts the tensors of its requests, inputs and outputs. A key that was idle
    may send one second's worth of ``requests_per_s`` at once, or a single request. ``flops_per_s``
    is what its problems may cost: a problem may be larger than a second's worth, and then the key
    waits until it has been paid for.
    """

    inflight: int | None = None
    inflight_bytes: int | None = None
    requests_per_s: float | None = None
    flops_per_s: float | None = None


NO_LIMITS = KeyLimits()


class Caller(NamedTuple):
    """Whose key a request came with; the name is empty where none is needed. ``scopes`` are what
    the key is for, None where it is for everything."""

    name: str
    limits: KeyLimits = NO_LIMITS
    scopes: frozenset[str] | None = None


ANYBODY = Caller("")


class Ticket(Protocol):
    """One request's share of what its key may have, until `leave`."""

    async def hold(self, size_bytes: int, flops: int = 0) -> None:
        """Count this many bytes of tensors to it, and the FLOPs that will be computed.

        Raises
        ------
        Overloaded
            With what the key's other requests hold, it is more than may be in flight; or what it
            had computed before is not paid for yet.
        ProblemTooLarge
            It is more by itself.
        """
        ...

    def leave(self) -> None:
        """Give it all back; harmless when it has been."""
        ...


class _Enters(Protocol):
    async def enter(self, caller: Caller) -> Ticket: ...


@asynccontextmanager
async def entered(engine: _Enters, caller: Caller) -> AsyncIterator[Ticket | None]:
    """A request's share of what its key may have, until the block ends; None without limits.

    Raises
    ------
    Overloaded
        The key has as much as it may.
    """
    if caller.limits == NO_LIMITS:
        yield None
        return
    ticket = await engine.enter(caller)
    try:
        yield ticket
    finally:
        ticket.leave()


@dataclass(slots=True)
class Usage:
    """What one key has in flight; ``refused`` counts what it was refused, by the limit's name."""

    requests: int = 0
    size_bytes: int = 0
    # When its next request would come if it kept exactly to its rate.
    due_s: float = 0.0
    # When what it had computed is paid for, at its rate of FLOPs.
    paid_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)


class Quotas:
    """The usage of every key that has limits. For the loop's thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._used: dict[str, Usage] = {}

    @property
    def used(self) -> Mapping[str, Usage]:
        """By the key's name."""
        return self._used

    def enter(self, caller: Caller) -> Entered:
        """Count one more request of this caller.

        Raises
        ------
        Overloaded
            It has as many in flight as may be, or they come too fast.
        """
        name, limits, _ = caller
        usage = self._used.setdefault(name, Usage())
        if limits.inflight is not None and usage.requests >= limits.inflight:
            usage.refused["inflight"] += 1
            raise Overloaded(
                f"the API key {name!r} has {usage.requests} requests in flight, and no more than "
                f"{limits.inflight} may be",
                retry_after_s=_RETRY_AFTER_S,
            )
        if limits.requests_per_s is not None:
            self._pace(name, usage, limits.requests_per_s)
        usage.requests += 1
        return Entered(name, limits, usage, self._now_s)

    def _pace(self, name: str, usage: Usage, per_s: float) -> None:
        now_s, apart_s = self._now_s(), 1 / per_s
        early_s = usage.due_s - max(1 - apart_s, 0.0) - now_s
        # A hair of tolerance, or rounding refuses who keeps exactly to the rate.
        if early_s > apart_s * 1e-6:
            usage.refused["requests_per_s"] += 1
            raise Overloaded(
                f"the API key {name!r} asks faster than {per_s:g} times a second, which is what "
                "it may",
                retry_after_s=early_s,
            )
        usage.due_s = max(usage.due_s, now_s) + apart_s


class Entered:
    """A `Ticket` where it is counted."""

    def __init__(
        self, name: str, limits: KeyLimits, usage: Usage, now_s: Callable[[], float]
    ) -> None:
        self._name, self._limits, self._usage, self._now_s = name, limits, usage, now_s
        self._size_bytes = 0
        self._left = False

    async def hold(self, size_bytes: int, flops: int = 0) -> None:
        """See `Ticket.hold`."""
        self.count(size_bytes, flops)

    def count(self, size_bytes: int, flops: int = 0) -> None:
        """See `Ticket.hold`."""
        limit, usage = self._limits.inflight_bytes, self._usage
        if limit is not None and size_bytes > limit:
            usage.refused["inflight_bytes"] += 1
            raise ProblemTooLarge(
                f"the request's tensors take {size_bytes:,} bytes, more than the {limit:,} that "
                f"the API key {self._name!r} may have in flight"
            )
        if limit is not None and usage.size_bytes + size_bytes > limit:
            usage.refused["inflight_bytes"] += 1
            raise Overloaded(
                f"the requests in flight of the API key {self._name!r} hold {usage.size_bytes:,} "
                f"of the {limit:,} bytes that they may; this one needs {size_bytes:,}",
                retry_after_s=_RETRY_AFTER_S,
            )
        if flops and self._limits.flops_per_s is not None:
            self._pay(flops, self._limits.flops_per_s)
        self._size_bytes += size_bytes
        usage.size_bytes += size_bytes

    def _pay(self, flops: int, per_s: float) -> None:
        usage, now_s = self._usage, self._now_s()
        # Who was idle has a second's worth to spend before anything is due.
        early_s = usage.paid_s - now_s
        if early_s > 1:
            usage.refused["flops_per_s"] += 1
            raise Overloaded(
                f"the API key {self._name!r} may have {per_s:.4g} FLOPs computed a second, and "
                f"what it had computed uses that up for {early_s:.3g} s",
                retry_after_s=early_s - 1,
            )
        usage.paid_s = max(usage.paid_s, now_s) + flops / per_s

    def leave(self) -> None:
        """See `Ticket.leave`."""
        if not self._left:
            self._left = True
            self._usage.requests -= 1
            self._usage.size_bytes -= self._size_bytes
