"""Counts of the calls computed, by layer, backend and kernel."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

__all__ = ["Counter", "Report", "Row", "count_left", "report"]


class Row(NamedTuple):
    """An operation on one layer, and what computed it.

    Attributes
    ----------
    operation, layer : str
    computed_by : str
        The backend's name, or ``PyTorch``.
    kernel : str
        The kernel's name; for PyTorch, why it computed.
    calls : int
    ms : float or None
        The mean time of a call, with `use(time_calls=True)`.
    """

    operation: str
    layer: str
    computed_by: str
    kernel: str
    calls: int
    ms: float | None = None


class Counter:
    """Counts the calls of one operation on one layer.

    Attributes
    ----------
    calls : int
        Those from Python.
    native : list
        Structures of native code whose field ``calls`` counts its own.
    """

    __slots__ = ("calls", "computed_by", "layer", "native", "operation", "runner")

    def __init__(self, operation: str, layer: str, computed_by: str, runner: Any) -> None:
        self.operation, self.layer = operation, layer
        self.computed_by, self.runner = computed_by, runner
        self.calls = 0
        self.native: list[Any] = []
        with _LOCK:
            _COUNTERS.append(self)

    def row(self) -> Row:
        # A runner knows its kernel after a call. For calls left to PyTorch, this is the reason.
        kernel = self.runner if isinstance(self.runner, str) else self.runner.kernel
        return Row(self.operation, self.layer, self.computed_by, kernel, self.total)

    @property
    def total(self) -> int:
        """All calls."""
        return self.calls + sum(int(each.calls) for each in self.native)

    def reset(self) -> None:
        self.calls = 0
        for each in self.native:
            each.calls = 0

    def take_seconds(self, reset: bool) -> tuple[float, int]:
        """Return the sum of the calls' times, and how many were timed."""
        take = getattr(self.runner, "take_seconds", None)
        return take(reset) if take is not None else (0.0, 0)


_COUNTERS: list[Counter] = []
_LEFT: dict[tuple[str, str, str], Counter] = {}
_LOCK = threading.Lock()


def count_left(operation: str, layer: str, reason: str) -> None:
    """Count a call that is left to PyTorch, under the reason."""
    key = (operation, layer, reason)
    if key not in _LEFT:
        _LEFT[key] = Counter(operation, layer, "PyTorch", reason)
    _LEFT[key].calls += 1


class Report:
    """Counts of the calls so far; prints as a table.

    Attributes
    ----------
    rows : tuple of Row
        Most calls first.
    """

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        if not self.rows:
            return "convgrad.torch has computed nothing yet"
        head = ("operation", "layer", "computed by", "kernel", "calls", "ms a call")
        cells = [
            head,
            *(
                (*row[:4], str(row.calls), "" if row.ms is None else f"{row.ms:.3f}")
                for row in self.rows
            ),
        ]
        widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )

    __repr__ = __str__


def report(*, reset: bool = False) -> Report:
    """Return which layers were computed by which kernel, and which were left to PyTorch.

    With `use(time_calls=True)`, it waits for those on a GPU.

    Parameters
    ----------
    reset : bool
        Set the counts to zero afterwards.
    """
    with _LOCK:
        counters = list(_COUNTERS)
    totals: dict[tuple[str, str, str, str], tuple[int, float, int]] = {}
    for counter in counters:
        if counter.total:
            row = counter.row()
            calls, seconds, timed = totals.get(row[:4], (0, 0.0, 0))
            more_seconds, more_timed = counter.take_seconds(reset)
            totals[row[:4]] = calls + row.calls, seconds + more_seconds, timed + more_timed
            if reset:
                counter.reset()
    rows = (
        Row(*what, calls, seconds / timed * 1e3 if timed else None)
        for what, (calls, seconds, timed) in totals.items()
    )
    return Report(tuple(sorted(rows, key=lambda row: -row.calls)))
