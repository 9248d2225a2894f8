"""Draws docs/gpu.svg: how far each layer is from its reference time, ours and PyTorch's.

    python tests/perf/plot_gpu.py

Reads `results/gpu.jsonl`: bfloat16, channels last, one panel for each class and operation. The
reference time is what the chip's measured peaks allow (see docs/speed.md).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter, StrMethodFormatter

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu.jsonl"
OUT = HERE.parents[1] / "docs" / "gpu.svg"
# A short name for each operation drawn. PyTorch's double backward passes would need a longer axis.
OPERATIONS = {
    "conv_bwd_data": "backward data",
    "grouped_conv_bwd_weight": "backward weight",
    "conv_backward": "both gradients",
    **{f"maxpool{ndim}d_fwd": "forward" for ndim in (1, 2, 3)},
    "maxpool1d_bwd": "backward",
    "conv_transpose_fwd": "forward",
    "conv_transpose_backward": "gradients",
    "maxpool2d_bwd": "max-pool backward",
    "maxpool3d_bwd": "max-pool backward",
    **{
        f"{name}_{way}": text
        for name in ("avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "max_unpool")
        for way, text in (("fwd", "forward"), ("bwd", "backward"))
    },
    "grouped_conv_conv_fwd": "fused forward",
}


def panels() -> dict[str, list[dict[str, Any]]]:
    """The rows of each panel, by its title."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if (row["dtype"], row["layout"]) == ("bfloat16", "NHWC") and row["op"] in OPERATIONS:
            title = f"{row['class']}, {OPERATIONS[row['op']]}"
            found.setdefault(title, []).append(row)
    return found


def draw(out: Path = OUT) -> None:
    """Write the figure."""
    found = panels()
    heights = [len(rows) for rows in found.values()]
    with mpl.rc_context({"svg.hashsalt": "gpu", "font.size": 7}):
        figure, columns = plt.subplots(
            len(found),
            sharex=True,
            squeeze=False,
            figsize=(7.5, 0.16 * sum(heights) + 0.42 * len(found)),
            gridspec_kw={"height_ratios": heights},
            layout="constrained",
        )
        axes = columns[:, 0]
        for (title, rows), one in zip(found.items(), axes, strict=True):
            for y, row in enumerate(rows):
                ours, peer = (row[key] / row["reference_ms"] for key in ("ours_ms", "peer_ms"))
                one.plot([ours, peer], [y, y], color="0.8", lw=1, zorder=1)
                one.plot(peer, y, "o", color="#d08030", ms=3.5, label="PyTorch, cuDNN")
                one.plot(ours, y, "o", color="#2060a0", ms=3.5, label="convgrad")
            one.set_yticks(range(len(rows)), [row["layer"] for row in rows])
            one.set_ylim(len(rows) - 0.5, -0.5)
            one.set_title(title, loc="left", fontsize=7, pad=2)
            one.axvline(1, color="0.5", lw=0.8)
            one.grid(axis="x", color="0.93")
            one.spines[["top", "right"]].set_visible(False)
        axes[-1].set_xscale("log")
        axes[-1].set_xticks([1, 2, 5, 10, 20, 50])
        axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes[-1].xaxis.set_minor_formatter(NullFormatter())
        axes[-1].set_xlabel("times the reference time (1 is what the chip allows)")
        handles, labels = axes[0].get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        figure.legend(named.values(), named.keys(), loc="outside upper right", ncols=2)
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw()
