"""What a run's requests got, by any key: how many, how fast, and how many were refused or failed.

Locust's own report mixes the refused with the failed and all users' requests with each other; the
objectives are about each way to send, and about what was accepted.
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
    """Takes requests as Locust tells of them; ``key_of`` gets the name of the way that one was
    sent, and says what it counts towards, None for nothing."""

    def __init__(self, key_of: Callable[[str], Hashable | None]) -> None:
        self._key_of = key_of
        self._answered_s: defaultdict[Hashable, list[float]] = defaultdict(list)
        self._refused: defaultdict[Hashable, int] = defaultdict(int)
        self._failures: defaultdict[Hashable, list[str]] = defaultdict(list)

    def take(
        self, request_type: str, response_time: float, exception: Exception | None, **_: Any
    ) -> None:
        """One request."""
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
        """What counted towards a key."""
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
        """Everything that something counted towards."""
        return list({**self._answered_s, **self._refused, **self._failures})

    def write(self, path: Path) -> None:
        """All of it, as JSON by the key."""
        path.write_text(json.dumps({str(key): self.of(key) for key in self.keys()}, indent=1))


def _quantile(ordered: list[float], q: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None
