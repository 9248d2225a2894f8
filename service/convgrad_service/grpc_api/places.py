"""A limited number of places, which no client can keep from the others."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping

from convgrad.errors import Overloaded, RequestTimeout, ServiceError
from convgrad_service.grpc_api.call import Call

__all__ = ["RETRY_AFTER_S", "Places", "larger_share"]

RETRY_AFTER_S = 1.0
# Who shares: clients first, then the connections of one client, which may be a proxy.
_SHARES: tuple[Callable[[Call], Hashable], ...] = (lambda call: call.client, lambda call: call.peer)


def larger_share(held: Mapping[Call, int], newcomer: Call, size: int) -> list[Call]:
    """Return the calls that should make room for ``size`` more of a newcomer's.

    They are those of the client that holds most, if it holds more than the newcomer then would. If
    there is none, they are those of such a connection.
    """
    for share in _SHARES:
        totals: Counter[Hashable] = Counter()
        for call, each in held.items():
            totals[share(call)] += each
        for who, most in totals.most_common(1):
            if most > totals[share(newcomer)] + size:
                return [call for call in held if share(call) == who]
    return []


class Places:
    """Places of calls; when all are taken, a newcomer may displace another call.

    That is the call that has been idle longest, if for ``patience_s`` or more; otherwise one of the
    client that has most places, if it has more than the newcomer's client then would.
    """

    def __init__(self, count: int, patience_s: float, idle: str) -> None:
        self.count = count
        self._patience_s, self._idle = patience_s, idle
        self._idle_since_s: dict[Call, float] = {}

    def take(self, call: Call) -> bool:
        """Return whether the call gets a place."""
        if len(self._idle_since_s) >= self.count and not self._displace(call):
            return False
        self._idle_since_s[call] = time.monotonic()
        return True

    def rest(self, call: Call) -> None:
        """Count the call, if it has a place, as idle from now on."""
        if call in self._idle_since_s:
            self._idle_since_s[call] = time.monotonic()

    def work(self, call: Call) -> None:
        """Count the call, if it has a place, as not idle."""
        if call in self._idle_since_s:
            self._idle_since_s[call] = math.inf

    def leave(self, call: Call) -> None:
        """Free the call's place, if it has one."""
        self._idle_since_s.pop(call, None)

    def _displace(self, newcomer: Call) -> bool:
        longest = min(self._idle_since_s, key=self._idle_since_s.__getitem__)
        if time.monotonic() - self._idle_since_s[longest] >= self._patience_s:
            self._cut(
                longest, RequestTimeout(f"{self._idle} {self._patience_s:g} s, and others wait")
            )
            return True
        found = larger_share(dict.fromkeys(self._idle_since_s, 1), newcomer, 1)
        if not found:
            return False
        self._cut(
            min(found, key=self._idle_since_s.__getitem__),
            Overloaded(
                f"this client had {len(found)} of {self.count} places, and others wait",
                retry_after_s=RETRY_AFTER_S,
            ),
        )
        return True

    def _cut(self, call: Call, error: ServiceError) -> None:
        del self._idle_since_s[call]
        call.cut(error)
