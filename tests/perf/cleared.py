"""What was checked once and need not be again: rows by name, each good for one key.

A key is a hash of what the check depends on. A file of results has one line for each row. What has
a row of its key need not run again; a row of another key is replaced.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Cleared", "key_of"]


def key_of(parts: Iterable[object]) -> str:
    """A hash of these, in this order."""
    key = hashlib.sha256()
    for part in parts:
        key.update(f"{part}\0".encode())
    return key.hexdigest()[:16]


class Cleared:
    """The rows of a file, by the fields that name them; written as they come, by any thread."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self._path, self._names = path, names
        self._rows = self._read()
        self._lock = threading.Lock()

    def get(self, name: Mapping[str, Any], key: str) -> dict[str, Any] | None:
        """The row of this name, if it is good for the key."""
        row = self._rows.get(self._name(name))
        return row if row is not None and row["key"] == key else None

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self._rows.values())

    def drop(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
        with self._lock:
            self._rows = {name: row for name, row in self._read().items() if not unwanted(row)}
            self._write()

    def put(self, rows: Iterable[dict[str, Any]]) -> None:
        """In place of older rows of the same names."""
        with self._lock:
            # What other runs have written meanwhile stays.
            self._rows = self._read() | {self._name(row): row for row in rows}
            self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(
            "".join(f"{json.dumps(self._rows[name])}\n" for name in sorted(self._rows)),
            encoding="utf-8",
        )
        # Whole or as before, also if the run is ended meanwhile.
        partial.replace(self._path)

    def _read(self) -> dict[tuple[str, ...], dict[str, Any]]:
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        return {self._name(row): row for row in map(json.loads, lines)}

    def _name(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self._names)
