"""Draws the stored results of `make bench-serve`: each way in, ours and the peer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

__all__ = ["draw"]

Record = Mapping[str, Any]
_OURS, _PEER = "#2f6f4f", "#b9b4a8"


def draw(records: Sequence[Record], target: Path) -> None:
    """One panel a size and malloc; times on a logarithmic axis, quartiles as whiskers."""
    panels = list(dict.fromkeys((row["size"], row["malloc"]) for row in records))
    paths = list(dict.fromkeys(row["transport"] for row in records))
    # The same ids in every run, so that only what was measured makes a difference.
    with mpl.rc_context({"svg.hashsalt": "serve", "font.size": 8}):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(3.4 * len(panels) + 1.6, 0.42 * len(paths) + 1.2), sharey=True
        )
        for axis, (size, malloc) in zip(axes, panels, strict=True):
            rows = {
                row["transport"]: row
                for row in records
                if (row["size"], row["malloc"]) == (size, malloc)
            }
            _bars(axis, [rows[path] for path in paths])
            axis.set_title(f"{size} in, malloc {malloc}")
            axis.set_xlabel("ms")
        axes[0].set_yticks(range(len(paths)), paths)
        axes[0].invert_yaxis()
        axes[-1].legend(loc="lower right", frameon=False)
        figure.tight_layout()
        target.parent.mkdir(exist_ok=True)
        figure.savefig(target, metadata={"Date": None})
        plt.close(figure)


def _bars(axis: Any, rows: Sequence[Record]) -> None:
    for shift, key, colour, label in (
        (-0.2, "ours", _OURS, "convgrad"),
        (0.2, "peer", _PEER, "Triton; for JSON FastAPI"),
    ):
        medians = [row[f"{key}_ms"] for row in rows]
        low, high = zip(*(row[f"{key}_quartiles_ms"] for row in rows), strict=True)
        below = [median - each for median, each in zip(medians, low, strict=True)]
        above = [each - median for median, each in zip(medians, high, strict=True)]
        places = [index + shift for index in range(len(rows))]
        axis.barh(places, medians, 0.36, color=colour, label=label)
        axis.errorbar(
            medians, places, xerr=(below, above), fmt="none", ecolor="#333333", elinewidth=0.7
        )
    axis.set_xscale("log")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
