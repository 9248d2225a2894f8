"""The table of docs/kernels.md on what each kernel family wins; see `readme_tables`."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

from tests.perf.records import Record, records, source_line

__all__ = ["families_table"]

WINS = 1.05


def families_table() -> str:
    """By what factor a family's rows are slower without it, those that win the least last."""
    rows = records("families")
    if not rows:
        return ""
    of_family = defaultdict(list)
    for row in rows:
        of_family[row["family"]].append(row)
    ordered = sorted(of_family.items(), key=lambda item: -_mean(item[1]))
    lines = [
        "| family | lines | rows | timed | won | least | geomean | most | wins most | instead |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for name, own in ordered:
        ratios = [_ratio(row) for row in own]
        best = max(own, key=_ratio)
        instead = Counter(_family_of(row["other"]) for row in own).most_common(1)[0][0]
        lines.append(
            f"| `{name}` | {best['family_lines']} | {best['family_rows']} | {len(own)} "
            f"| {sum(one > WINS for one in ratios)} | {min(ratios):.2f} | {_mean(own):.2f} "
            f"| {max(ratios):.2f} | {_what(best)} | `{instead}` |"
        )
    return "\n".join([*lines, "", source_line(rows, "make bench-families")])


def _ratio(row: Record) -> float:
    return float(row["other_ms"] / row["ours_ms"])


def _mean(rows: list[Record]) -> float:
    return statistics.geometric_mean(map(_ratio, rows))


def _what(row: Record) -> str:
    dtype = row["dtype"] + (f", {row['precision']}" if row["precision"] else "")
    layer = row["layer"].replace(">", " to ").replace("_", " ")
    return f"{row['op']} of {layer}, batch {row['batch']}, {dtype}, {row['layout']}"


def _family_of(kernel: str) -> str:
    """The kernel without its tile."""
    name = kernel.split(" + ")[0].split("/")[0]
    for direction in ("_fwd", "_bwd_data", "_bwd_weight"):
        name = name.partition(direction)[0]
    return name.partition("_through_channels_last")[0].rstrip("0123456789x_")
