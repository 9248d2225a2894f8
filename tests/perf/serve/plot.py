"""Draws the stored results of `make bench-serve`: each way in, ours and the peer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

__all__ = ["draw"]

Record = Mapping[str, Any]
_OURS, _PEER = "#1f6f4f", "#a8a294"


def draw(records: Sequence[Record], target: Path) -> None:
    """One panel a size and malloc; medians on a logarithmic axis, quartiles as whiskers."""
    panels = list(dict.fromkeys((row["size"], row["malloc"]) for row in records))
    paths = list(dict.fromkeys(row["transport"] for row in records))
    # The same ids in every run, so that only what was measured makes a difference.
    with mpl.rc_context({"svg.hashsalt": "serve", "font.size": 8}):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(2.8 * len(panels), 0.36 * len(paths) + 1.2), sharey=True
        )
        for axis, (size, malloc) in zip(axes, panels, strict=True):
            rows = {
                row["transport"]: row
                for row in records
                if (row["size"], row["malloc"]) == (size, malloc)
            }
            _points(axis, [rows[path] for path in paths])
            axis.set_title(f"{size} in, malloc {malloc}")
            axis.set_xlabel("ms")
        axes[0].set_yticks(range(len(paths)), paths)
        axes[0].invert_yaxis()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper left", frameon=False)
        figure.tight_layout()
        target.parent.mkdir(exist_ok=True)
        figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)


def _points(axis: Any, rows: Sequence[Record]) -> None:
    places = range(len(rows))
    for key, colour, label in (
        ("peer", _PEER, "Triton; for JSON FastAPI"),
        ("ours", _OURS, "convgrad"),
    ):
        medians = [row[f"{key}_ms"] for row in rows]
        low, high = zip(*(row[f"{key}_quartiles_ms"] for row in rows), strict=True)
        below = [median - each for median, each in zip(medians, low, strict=True)]
        above = [each - median for median, each in zip(medians, high, strict=True)]
        axis.errorbar(
            medians, places, xerr=(below, above), fmt="o", markersize=5, color=colour, label=label
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params("x", labelrotation=60)
    axis.grid(color="#e4e1d8", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
