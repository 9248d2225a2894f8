"""Where to cut: even ranges, and slices of arrays in a layout."""

from __future__ import annotations

from collections.abc import Iterator

from convgrad_service.problems.base import Slices
from convgrad_service.problems.geometry import Span
from convgrad_service.problems.layouts import Layout

__all__ = ["activation_slices", "even_spans", "grid", "whole"]


def even_spans(extent: int, parts: int) -> list[Span]:
    """[0, extent) in min(parts, extent) ranges whose lengths differ by one at most."""
    parts = max(1, min(parts, extent))
    return [(i * extent // parts, (i + 1) * extent // parts) for i in range(parts)]


def grid(batch: int, rows: int, parts: int) -> Iterator[tuple[Span, Span]]:
    """Ranges of N and of rows: N alone while it suffices, then every sample in equal rows too."""
    per_sample = 1 if parts <= batch else -(-parts // batch)
    for samples in even_spans(batch, parts):
        for span in even_spans(rows, per_sample):
            yield samples, span


def activation_slices(layout: Layout, samples: Span, rows: Span) -> Slices:
    """A range of samples, and one of rows of the outermost spatial dimension, of an activation."""
    cut = {layout.axis("N"): slice(*samples), layout.spatial_axis(0): slice(*rows)}
    return tuple(cut.get(axis, slice(None)) for axis in range(layout.rank))


def whole(rank: int) -> Slices:
    """All of a tensor that no cut divides."""
    return (slice(None),) * rank
