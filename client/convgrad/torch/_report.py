"""What was computed, by whom: counts for each layer that a program's backward passes met."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Report", "Row", "record", "report"]


class Row(NamedTuple):
    """One kind of call: what was asked for, who computed it by which kernel, and how often."""

    operation: str
    layer: str
    computed_by: str
    kernel: str
    calls: int


@dataclass
class _Log:
    counts: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


_LOG = _Log()


def record(operation: str, layer: str, computed_by: str, kernel: str) -> None:
    """Count one call."""
    with _LOG.lock:
        _LOG.counts[operation, layer, computed_by, kernel] += 1


class Report:
    """The calls counted so far; printing it shows a table.

    Attributes
    ----------
    rows : tuple of Row
        In descending order of calls.
    """

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows

    def __str__(self) -> str:
        if not self.rows:
            return "convgrad.torch has computed nothing yet"
        head = ("operation", "layer", "computed by", "kernel", "calls")
        cells = [head, *((*row[:4], str(row.calls)) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )

    __repr__ = __str__


def report(*, reset: bool = False) -> Report:
    """Which layers were computed since the start, by which kernel, and what PyTorch computed.

    Parameters
    ----------
    reset : bool
        Start counting anew afterwards.
    """
    with _LOG.lock:
        rows = tuple(Row(*key, calls) for key, calls in _LOG.counts.most_common())
        if reset:
            _LOG.counts.clear()
    return Report(rows)
