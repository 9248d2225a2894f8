"""The tables of docs/load.md, from `results/load.jsonl`; `readme_tables` puts them there."""

from __future__ import annotations

import statistics

from tests.perf.records import Record, records, source

__all__ = [
    "how_far_table",
    "load_table",
    "ramp_table",
    "ray_costs_table",
    "ray_scaling_table",
    "ray_table",
    "rows_of",
    "soak_table",
]

MIB = 2**20
# Bytes of tensors in and out, and seconds on a device, of problems that might be sent to replicas.
_PROBLEMS = (1e6, 0.01), (1e6, 0.1), (1e7, 0.1), (1e7, 1.0), (1e8, 1.0), (1e9, 10.0)


def rows_of(run: str) -> list[Record]:
    """What one kind of run stored; nothing where it has not run."""
    return [row for row in records("load") if row["run"] == run]


def _table(heads: str, lines: list[str], rows: list[Record], command: str) -> str:
    columns = heads.count("|") - 1
    ruler = "| --- |" + " ---: |" * (columns - 1)
    behind = f"{source(rows, command, rows[0]['git_sha'])}."
    return "\n".join([heads, ruler, *lines, "", behind])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"


def load_table() -> str:
    """Every mix over every wire, against its objective."""
    rows = rows_of("mixes")
    if not rows:
        return ""
    lines = [
        f"| {row['mix']}, {row['users']} users, {row['wire']} | {row['answered']:,} | "
        f"{row['failed'] + row['refused']} | {row['answered'] / row['seconds']:.1f} | "
        f"{_ms(row['p50_s'])} | {_ms(row['p99_s'])} | {_ms(row['objective_p99_s'])} |"
        for row in rows
    ]
    heads = "| mix | answered | failed | a second | p50, ms | p99, ms | objective for p99, ms |"
    return _table(heads, lines, rows, "make load")


def ramp_table() -> str:
    """Each step of the ramp: medians of the climbs, beside the least and the most of them."""
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
        "| users | answered a second | refused a second | failed | p50, ms | p99, ms "
        "| cores that the server used | that clients used | that others used |"
    )
    return _table(heads, lines, rows, "make load")


def soak_table() -> str:
    """The soak by quarters."""
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
    heads = "| quarter | answered | failed | memory held, median, MiB |"
    return _table(heads, lines, rows, "make soak")


def ray_table() -> str:
    """Answers a second by replicas."""
    rows = [row for row in rows_of("ray measured") if "throughput" in row]
    if not rows:
        return ""
    one = {row["throughput"]: row["answered_per_s"] for row in reversed(rows)}
    lines = []
    for row in rows:
        what = "this machine's cores"
        if row["throughput"] == "own":
            what = f"a device of its own, which takes {row['device_s'] * 1e3:.0f} ms"
        rate = row["answered_per_s"]
        lines.append(
            f"| {row['replicas']}, each with {what} | {rate:.1f} | "
            f"{rate / one[row['throughput']]:.2f}x |"
        )
    return _table("| replicas | answers a second | of one |", lines, rows, "make ray")


def ray_scaling_table() -> str:
    """How replicas came and went with the work."""
    rows = rows_of("ray autoscaling")
    if not rows:
        return ""
    lines = [f"| {row['scaling']} | {row['at_s']:.0f} | {row['replicas']} |" for row in rows]
    return _table("| what | after, s | replicas |", lines, rows, "make ray")


def ray_costs_table() -> str:
    """What the way to a replica and a split cost."""
    rows = [row for row in rows_of("ray measured") if "cost" in row]
    if not rows:
        return ""
    lines = []
    for row in rows:
        if row["cost"] == "way":
            server = "a plain server" if row["through"] == "plain" else "a replica"
            what = f"{row['size']} in, a quarter out, by {server}: all of it"
            spent_s = row["taken_s"]
            rate = f"{row['bytes'] / spent_s / 1e9:.2g}"
        else:
            what = f"{row['op']} in {row['pieces']} pieces: cut, and put together"
            spent_s, rate = row["cut_s"] + row["combine_s"], ""
        lines.append(f"| {what} | {spent_s * 1e3:.2f} | {row['computed_s'] * 1e3:.2f} | {rate} |")
    heads = "| what | ms | of which, or beside which, computing | GB/s of tensors |"
    return _table(heads, lines, rows, "make ray")


def how_far_table() -> str:
    """From the measured costs: how many replicas one front end feeds, how many pieces pay."""
    ways = {row["size"]: row for row in rows_of("ray measured") if row.get("through") == "ray"}
    if not ways:
        return ""
    small, large = ways["1 KiB"], ways["64 MiB"]
    fixed_s = small["taken_s"] - small["computed_s"]
    per_byte_s = (large["taken_s"] - large["computed_s"] - fixed_s) / large["bytes"]
    lines = []
    for bytes_, device_s in _PROBLEMS:
        way_s = fixed_s + per_byte_s * bytes_
        # Each piece costs the fixed part once more; past this number that is more than it saves.
        pieces = max(1, round((device_s / fixed_s) ** 0.5))
        split_s = device_s / pieces + pieces * fixed_s + per_byte_s * bytes_
        lines.append(
            f"| {bytes_ / 1e6:.0f} MB, {device_s:g} s | {way_s * 1e3:.0f} | {1 / way_s:.1f} | "
            f"{device_s / way_s:.1f} | {pieces} | {(device_s + way_s) / split_s:.1f}x |"
        )
    heads = (
        "| tensors in and out, time on a device | the way, ms | a front end's answers a second "
        "| replicas it keeps busy | pieces that pay | which makes one problem faster by |"
    )
    said = (
        f"The way to a replica and back takes {fixed_s * 1e3:.1f} ms and {per_byte_s * 1e9:.2f} ns "
        "a byte (the table in [docs/load.md](../docs/load.md#ray-serve)). From these two alone:\n\n"
    )
    return said + _table(heads, lines, [small], "make ray")
