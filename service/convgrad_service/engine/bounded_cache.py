"""What was made once and may be needed again, while there is not too much of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

__all__ = ["BoundedCache"]

T = TypeVar("T")


class BoundedCache:
    """Values by their keys, at most ``most``; then all are forgotten. Safe from any thread."""

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, made: Callable[[], T]) -> T:
        """The value of a key, or what ``made`` returns."""
        found: T | None = self._values.get(key)
        if found is None:
            if len(self._values) >= self._most:
                self._values.clear()
            found = self._values[key] = made()
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()
