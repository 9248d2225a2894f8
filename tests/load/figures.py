"""Counts and latencies of a run's requests, grouped by any key.

Locust's own report does not separate refused from failed requests, or users from each other; the
objectives apply to accepted requests of each wire format.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from convgrad.errors import Overloaded

__all__ = ["Figures"]


class Figures:
    """Collects requests reported by Locust.

    ``key_of`` maps a request's type to its group, or None to ignore it.
    """

    def __init__(self, key_of: Callable[[str], Hashable | None]) -> None:
        self._key_of = key_of
        self._answered_s: defaultdict[Hashable, list[float]] = defaultdict(list)
        self._refused: defaultdict[Hashable, int] = defaultdict(int)
        self._failures: defaultdict[Hashable, list[str]] = defaultdict(list)

    def take(
        self, request_type: str, response_time: float, exception: Exception | None, **_: Any
    ) -> None:
        """Add one request; a listener of Locust's `request` event."""
        key = self._key_of(request_type)
        if key is None:
            return
        if exception is None:
            self._answered_s[key].append(response_time / 1e3)
        elif isinstance(exception, Overloaded):
            self._refused[key] += 1
        else:
            self._failures[key].append(f"{type(exception).__name__}: {exception}")

    def of(self, key: Hashable) -> dict[str, Any]:
        """Return the figures of one group."""
        took = sorted(self._answered_s[key])
        failures = self._failures[key]
        return {
            "answered": len(took),
            "refused": self._refused[key],
            "failed": len(failures),
            "first_failure": failures[0][:300] if failures else None,
            "p50_s": _quantile(took, 0.5),
            "p99_s": _quantile(took, 0.99),
        }

    def keys(self) -> list[Hashable]:
        """Return all groups that have requests."""
        return list({**self._answered_s, **self._refused, **self._failures})

    def write(self, path: Path) -> None:
        """Write the figures of all groups as JSON."""
        path.write_text(json.dumps({str(key): self.of(key) for key in self.keys()}, indent=1))


def _quantile(ordered: list[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None
