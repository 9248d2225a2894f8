"""Draws docs/load.svg: the ramp's goodput and latency, and the memory of the soak.

python -m tests.perf.plot_load
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt

from tests.perf.load_tables import rows_of

OUT = Path(__file__).resolve().parents[2] / "docs" / "load.svg"


def draw() -> None:
    """Three panels from the stored rows."""
    plt.rcParams.update({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "load"})
    figure, (rates, times, memory) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    ramp, soak = rows_of("ramp"), rows_of("soak")
    users = [row["users"] for row in ramp]
    rates.plot(users, [row["answered_per_s"] for row in ramp], "o-", label="answered")
    climbs = [[climb["answered_per_s"] for climb in row["climbs"]] for row in ramp]
    rates.fill_between(users, list(map(min, climbs)), list(map(max, climbs)), alpha=0.2)
    rates.plot(users, [row["refused_per_s"] for row in ramp], "s--", label="refused (429)")
    rates.set(title="The ramp: a second", xlabel="users", xscale="log")
    rates.legend(frameon=False)
    for quantile in ("p50", "p99"):
        values = [row[f"{quantile}_s"] for row in ramp]
        times.plot(users, [1e3 * value for value in values], "o-", label=quantile)
    times.set(title="The ramp: ms of what was accepted", xlabel="users", xscale="log")
    times.legend(frameon=False)
    for axes in (rates, times):
        axes.set_xticks(users, [str(count) for count in users])
        axes.minorticks_off()
    memory.plot(
        [row["at_s"] / 60 for row in soak], [row["held_bytes"] / 2**20 for row in soak], "."
    )
    memory.set(title="The soak: MiB held by all processes", xlabel="minutes")
    for axes in (rates, times, memory):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    draw()
