"""Even ranges, and slices of arrays in a layout, for splitting problems."""

from __future__ import annotations

from collections.abc import Iterator

from convgrad_service.problems.base import Slices
from convgrad_service.problems.geometry import Span
from convgrad_service.problems.layouts import Layout

__all__ = ["activation_slices", "even_spans", "grid", "whole"]


def even_spans(extent: int, parts: int) -> list[Span]:
    """Divide [0, extent) into min(parts, extent) ranges whose lengths differ by at most one."""
    parts = max(1, min(parts, extent))
    return [(i * extent // parts, (i + 1) * extent // parts) for i in range(parts)]


def grid(batch: int, rows: int, parts: int) -> Iterator[tuple[Span, Span]]:
    """Yield ranges of N and of rows: rows are divided only if there are more parts than samples."""
    per_sample = 1 if parts <= batch else -(-parts // batch)
    for samples in even_spans(batch, parts):
        for span in even_spans(rows, per_sample):
            yield samples, span


def activation_slices(layout: Layout, samples: Span, rows: Span) -> Slices:
    """Return the slices of an activation for ranges of samples and of outermost spatial rows."""
    cut = {layout.axis("N"): slice(*samples), layout.spatial_axis(0): slice(*rows)}
    return tuple(cut.get(axis, slice(None)) for axis in range(layout.rank))


def whole(rank: int) -> Slices:
    """Return the slices of a whole tensor."""
    return (slice(None),) * rank
