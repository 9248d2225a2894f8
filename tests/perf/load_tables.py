"""The tables of docs/load.md, from `results/load.jsonl`; `readme_tables` inserts them."""

from __future__ import annotations

import statistics

from tests.load.run import MAX_RATIO
from tests.perf.records import Record, records, source

__all__ = [
    "load_table",
    "open_loop_table",
    "ramp_table",
    "ray_costs_table",
    "ray_scaling_table",
    "ray_table",
    "rows_of",
    "scaling_limits_table",
    "soak_table",
]

MIB = 2**20
# Bytes of tensors in and out, and seconds of compute, of example problems.
_PROBLEMS = (1e6, 0.01), (1e6, 0.1), (1e7, 0.1), (1e7, 1.0), (1e8, 1.0), (1e9, 10.0)


def rows_of(run: str) -> list[Record]:
    """Return the rows stored by one kind of run."""
    return [row for row in records("load") if row["run"] == run]


def _table(heads: str, lines: list[str], rows: list[Record], command: str) -> str:
    columns = heads.count("|") - 1
    ruler = "| --- |" + " ---: |" * (columns - 1)
    behind = f"{source(rows, command, rows[0]['git_sha'])}."
    return "\n".join([heads, ruler, *lines, "", behind])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def load_table() -> str:
    """Latency and throughput of every mix over every wire format, with the objective for p99."""
    rows = rows_of("mixes")
    if not rows:
        return ""
    lines = [
        f"| {row['mix']}, {row['users']} users, {row['wire']} | {row['answered']:,} | "
        f"{row['failed'] + row['refused']} | {row['answered'] / row['seconds']:.1f} | "
        f"{_ms(row['p50_s'])} | {_ms(row['p99_s'])} | {_ms(MAX_RATIO * row['p99_s'])} |"
        for row in rows
    ]
    heads = "| mix | answered | failed | requests/s | p50, ms | p99, ms | objective for p99, ms |"
    return _table(heads, lines, rows, "make load")


def ramp_table() -> str:
    """Each step of the ramp: medians of the runs, with their minimum and maximum."""
    rows = rows_of("ramp")
    if not rows:
        return ""
    lines = []
    for row in rows:
        rates = sorted(climb["answered_per_s"] for climb in row["climbs"])
        lines.append(
            f"| {row['users']} | {row['answered_per_s']:.0f} ({rates[0]:.0f} to {rates[-1]:.0f}) | "
            f"{row['refused_per_s']:.0f} | {row['failed']} | {_ms(row['p50_s'])} | "
            f"{_ms(row['p99_s'])} | {row['server_cores']:.2f} | {row['clients_cores']:.2f} | "
            f"{row['other_cores']:.2f} |"
        )
    heads = (
        "| users | answered/s | refused/s | failed | p50, ms | p99, ms "
        "| cores used by the server | by clients | by other processes |"
    )
    return _table(heads, lines, rows, "make load")


def open_loop_table() -> str:
    """Latency quantiles of each mix at its arrival rate."""
    rows = [row for row in records("load") if row["run"].startswith("open loop ")]
    columns = ("p50_s", "p90_s", "p99_s", "p99.9_s", "late_p99_s")
    lines = [
        f"| {row['mix']} | {row['rate']:g} | {row['sent']:,} | {row['sent'] - row['answered']} | "
        + " | ".join(f"{row[name] * 1e3:.1f}" for name in columns)
        + " |"
        for row in rows
    ]
    heads = (
        "| mix | requests/s | sent | failed | p50, ms | p90, ms | p99, ms | p99.9, ms "
        "| generator's lateness, p99, ms |"
    )
    return _table(heads, lines, rows, "make load-open")


def soak_table() -> str:
    """The soak test, by quarters."""
    rows = rows_of("soak")
    if not rows:
        return ""
    size = max(1, len(rows) // 4)
    lines = []
    for quarter in range(4):
        some = rows[quarter * size : (quarter + 1) * size if quarter < 3 else None]
        held = statistics.median(row["held_bytes"] for row in some) / MIB
        lines.append(
            f"| from {some[0]['at_s'] / 60:.0f} min | {sum(row['answered'] for row in some):,} | "
            f"{sum(row['failed'] + row['refused'] for row in some)} | {held:.0f} |"
        )
    heads = "| quarter | answered | failed | memory in use, median, MiB |"
    return _table(heads, lines, rows, "make soak")


def ray_table() -> str:
    """Throughput by number of replicas."""
    rows = [row for row in rows_of("ray measured") if "throughput" in row]
    if not rows:
        return ""
    one = {row["throughput"]: row["answered_per_s"] for row in reversed(rows)}
    lines = []
    for row in rows:
        what = "sharing this machine's cores"
        if row["throughput"] == "own":
            what = f"each with its own device ({row['device_s'] * 1e3:.0f} ms a request)"
        rate = row["answered_per_s"]
        lines.append(
            f"| {row['replicas']}, {what} | {rate:.1f} | {rate / one[row['throughput']]:.2f}x |"
        )
    return _table("| replicas | requests/s | speedup |", lines, rows, "make ray")


def ray_scaling_table() -> str:
    """How the number of replicas followed the load."""
    rows = rows_of("ray autoscaling")
    if not rows:
        return ""
    lines = [f"| {row['scaling']} | {row['at_s']:.0f} | {row['replicas']} |" for row in rows]
    return _table("| load | at, s | replicas |", lines, rows, "make ray")


def ray_costs_table() -> str:
    """Overhead of the path to a replica, and of splitting a problem."""
    rows = [row for row in rows_of("ray measured") if "cost" in row]
    if not rows:
        return ""
    lines = []
    for row in rows:
        if row["cost"] == "way":
            server = "a plain server" if row["through"] == "plain" else "a replica"
            what = f"{row['size']} in, a quarter of it out, through {server}: total"
            spent_s = row["taken_s"]
            rate = f"{row['bytes'] / spent_s / 1e9:.2g}"
        else:
            what = f"{row['op']} in {row['pieces']} pieces: cutting and combining"
            spent_s, rate = row["cut_s"] + row["combine_s"], ""
        lines.append(f"| {what} | {spent_s * 1e3:.2f} | {row['computed_s'] * 1e3:.2f} | {rate} |")
    heads = "| step | ms | compute, ms | GB/s of tensors |"
    return _table(heads, lines, rows, "make ray")


def scaling_limits_table() -> str:
    """Extrapolate from the measured overhead: replicas per front end, and useful pieces."""
    round_trips = {
        row["size"]: row for row in rows_of("ray measured") if row.get("through") == "ray"
    }
    if not round_trips:
        return ""
    small, large = round_trips["1 KiB"], round_trips["64 MiB"]
    fixed_s = small["taken_s"] - small["computed_s"]
    per_byte_s = (large["taken_s"] - large["computed_s"] - fixed_s) / large["bytes"]
    lines = []
    for bytes_, device_s in _PROBLEMS:
        overhead_s = fixed_s + per_byte_s * bytes_
        # Each piece adds the fixed overhead; beyond this number it costs more than it saves.
        pieces = max(1, round((device_s / fixed_s) ** 0.5))
        split_s = device_s / pieces + pieces * fixed_s + per_byte_s * bytes_
        speedup = (device_s + overhead_s) / split_s
        lines.append(
            f"| {bytes_ / 1e6:.0f} MB, {device_s:g} s | {overhead_s * 1e3:.0f} "
            f"| {1 / overhead_s:.1f} | {device_s / overhead_s:.1f} | {pieces} | {speedup:.1f}x |"
        )
    heads = (
        "| tensors in and out, compute time | overhead, ms | requests/s per front end "
        "| replicas it keeps busy | best number of pieces | speedup of one problem |"
    )
    intro = (
        f"The round trip to a replica costs {fixed_s * 1e3:.1f} ms plus {per_byte_s * 1e9:.2f} ns "
        "per byte ([measured](../docs/load.md#ray-serve)). Extrapolated from these two figures:\n\n"
    )
    return intro + _table(heads, lines, [small], "make ray")
