"""Draws docs/networks.svg: the gradients of whole networks, ours compared with cuDNN's, by batch.

    python -m tests.perf.plot_networks

A bar is our time as a share of cuDNN's; the mark in it is the reference time, which is what the
chip's measured peaks allow (see docs/speed.md).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from tests.perf.network_tables import NAMES, network_sums

OUT = Path(__file__).resolve().parents[2] / "docs" / "networks.svg"
FASTER, SLOWER = "#2060a0", "#c05030"


def draw(out: Path = OUT) -> None:
    """A panel for each batch, a bar for each network."""
    sums = network_sums()
    networks = list(dict.fromkeys(network for network, _ in sums))
    batches = sorted({batch for _, batch in sums})
    with mpl.rc_context({"svg.hashsalt": "networks", "font.size": 8}):
        figure, panels = plt.subplots(
            1, len(batches), sharey=True, squeeze=False, figsize=(11, 3.6), layout="constrained"
        )
        axes = panels[0]
        for batch, one in zip(batches, axes, strict=True):
            for y, network in enumerate(networks):
                found = sums.get((network, batch))
                if found is None:
                    one.text(0.02, y, "not measured", va="center", color="0.5")
                    continue
                ours, peer = found["ours_ms"], found["peer_ms"]
                one.barh(y, ours / peer, 0.62, color=FASTER if ours <= peer else SLOWER)
                one.plot(2 * [found["reference_ms"] / peer], [y - 0.31, y + 0.31], "w", lw=1.6)
                one.text(1.16, y, f"{ours:.3g} / {peer:.3g} ms", va="center", fontsize=7)
            one.axvline(1, color="0.2", lw=1)
            one.set_xlim(0, 1.55)
            one.set_xticks([0, 0.5, 1])
            one.xaxis.set_major_formatter(PercentFormatter(1))
            one.set_title(f"batch {batch}", loc="left")
            one.set_title("convgrad / cuDNN", loc="right", fontsize=7)
            one.spines[["top", "right"]].set_visible(False)
        axes[0].set_yticks(range(len(networks)), [NAMES[network] for network in networks])
        axes[0].invert_yaxis()
        axes[len(axes) // 2].set_xlabel("convgrad's time as a share of cuDNN's")
        keys = [
            Rectangle((0, 0), 1, 1, color=FASTER, label="convgrad, faster than cuDNN"),
            Rectangle((0, 0), 1, 1, color=SLOWER, label="convgrad, slower than cuDNN"),
            Line2D([], [], color="0.2", lw=1, label="cuDNN (100%)"),
            Line2D([], [], color="w", lw=1.6, label="what the chip allows"),
        ]
        figure.legend(
            handles=keys, loc="outside upper center", ncols=len(keys), facecolor="0.8", frameon=True
        )
        figure.savefig(out, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw()
