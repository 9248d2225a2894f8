"""Quotas of API keys: requests and bytes in flight, requests and FLOPs per second.

Usage is counted in the hub, over all front ends and transports. Each request carries its key's
limits, read from the key file. Requests over a limit are refused, not queued, so that one key's
excess takes no queue slots from others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from convgrad.errors import Overloaded, ProblemTooLarge

# Only the caller knows when its other requests end; the SDK's first retries wait a second anyway.
_RETRY_AFTER_S = 1.0


class KeyLimits(NamedTuple):
    """The limits of one key; None means unlimited.

    ``inflight_bytes`` counts inputs and outputs. After an idle period a key may send a burst of one
    second's ``requests_per_s``, at least one request. ``flops_per_s`` is a token bucket that may be
    overdrawn: after a problem larger than the bucket, the key waits until it is refilled.
    """

    inflight: int | None = None
    inflight_bytes: int | None = None
    requests_per_s: float | None = None
    flops_per_s: float | None = None


NO_LIMITS = KeyLimits()


class Caller(NamedTuple):
    """The owner of a request's API key; ``name`` is "" without keys, ``scopes`` None for all."""

    name: str
    limits: KeyLimits = NO_LIMITS
    scopes: frozenset[str] | None = None


ANYBODY = Caller("")


class Ticket(Protocol):
    """One request's share of its key's quota, until `release`."""

    async def charge(self, size_bytes: int, flops: int = 0) -> None:
        """Charge the bytes of a request's tensors and its FLOPs to the key.

        Raises
        ------
        Overloaded
            The key's requests in flight hold too many bytes, or its FLOPs are used up for now.
        ProblemTooLarge
            The request alone exceeds the bytes in flight.
        """
        ...

    def release(self) -> None:
        """Return the share; may be called again."""
        ...


@dataclass(slots=True)
class Usage:
    """One key's usage; ``refused`` counts refusals by the name of the limit."""

    requests: int = 0
    size_bytes: int = 0
    # When the next request is due at the key's rate.
    next_s: float = 0.0
    # When the FLOPs charged so far are paid off at the key's rate.
    paid_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)


class Quotas:
    """The usage of all keys that have limits. For the event loop's thread."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._used: dict[str, Usage] = {}

    @property
    def used(self) -> Mapping[str, Usage]:
        """Usage by key name."""
        return self._used

    def acquire(self, caller: Caller) -> CountedTicket:
        """Count one more request of this caller.

        Raises
        ------
        Overloaded
            The key has too many requests in flight, or they arrive too fast.
        """
        name, limits, _ = caller
        usage = self._used.setdefault(name, Usage())
        if limits.inflight is not None and usage.requests >= limits.inflight:
            usage.refused["inflight"] += 1
            raise Overloaded(
                f"the API key {name!r} has {usage.requests} requests in flight; its limit is "
                f"{limits.inflight}",
                retry_after_s=_RETRY_AFTER_S,
            )
        if limits.requests_per_s is not None:
            self._limit_rate(name, usage, limits.requests_per_s)
        usage.requests += 1
        return CountedTicket(name, limits, usage, self._now_s)

    def _limit_rate(self, name: str, usage: Usage, per_s: float) -> None:
        now_s, interval_s = self._now_s(), 1 / per_s
        early_s = usage.next_s - max(1 - interval_s, 0.0) - now_s
        # Tolerance for rounding, so that a key exactly at its rate is not refused.
        if early_s > interval_s * 1e-6:
            usage.refused["requests_per_s"] += 1
            raise Overloaded(
                f"the API key {name!r} sends more than {per_s:g} requests a second, its limit",
                retry_after_s=early_s,
            )
        usage.next_s = max(usage.next_s, now_s) + interval_s


class CountedTicket:
    """A `Ticket` in the hub's process."""

    def __init__(
        self, name: str, limits: KeyLimits, usage: Usage, now_s: Callable[[], float]
    ) -> None:
        self._name, self._limits, self._usage, self._now_s = name, limits, usage, now_s
        self._size_bytes = 0
        self._released = False

    async def charge(self, size_bytes: int, flops: int = 0) -> None:
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
        # The bucket holds one second's worth.
        early_s = usage.paid_s - now_s
        if early_s > 1:
            usage.refused["flops_per_s"] += 1
            raise Overloaded(
                f"the API key {self._name!r} has used its {per_s:.4g} FLOPs a second for the next "
                f"{early_s:.3g} s",
                retry_after_s=early_s - 1,
            )
        usage.paid_s = max(usage.paid_s, now_s) + flops / per_s

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._usage.requests -= 1
            self._usage.size_bytes -= self._size_bytes
