"""Writes what the page at ``/ui`` shows of whole networks, from stored results (`make readme`)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.perf.network_tables import NAMES, network_sums
from tests.perf.records import commits, records

__all__ = ["OUT", "networks_json"]

OUT = Path(__file__).resolve().parents[2] / "service" / "ui" / "public" / "networks.json"


def networks_json() -> str:
    """The times of both gradients of each network by batch, in ms, and where they were measured."""
    rows = records("networks")
    sums = [
        {"network": NAMES[network], "batch": batch, **{k: round(v, 5) for k, v in times.items()}}
        for (network, batch), times in network_sums().items()
    ]
    sums.sort(key=lambda one: (one["batch"], one["network"]))
    told = {name: rows[-1][name] for name in ("device", "peer", "dtype", "layout")}
    return json.dumps({**told, "commits": commits(rows), "sums": sums}, indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(networks_json(), encoding="utf-8")
