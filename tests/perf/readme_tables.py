"""Writes the tables of documents from the stored results and the settings (`make readme`).

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test asks that the
documents are what this script would write, so a figure there always has a record behind it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convgrad_service.settings import markdown_table
from tests.perf import load_tables

ROOT = Path(__file__).resolve().parents[2]
README, LOAD = ROOT / "README.md", ROOT / "docs" / "load.md"
DEPLOY = ROOT / "deploy" / "README.md"
RESULTS = Path(__file__).parent / "results"
LAYERS = Path(__file__).parent / "suite" / "layers.json"

Record = Mapping[str, Any]


def records(bench: str) -> list[Record]:
    """The stored measurements of one benchmark; none where it has not run."""
    path = RESULTS / f"{bench}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def source(rows: list[Record], command: str) -> str:
    """One sentence: the command, the machine, the day and the versions behind a table."""
    first = rows[0]
    commits = ", ".join(dict.fromkeys(row["git_sha"][:7] for row in rows))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return (
        f"`{command}` on {first['device']}, {first['utc'][:10]}, at {commits} "
        f"({versions}); medians."
    )


def wire_table() -> str:
    """Decoding and encoding, as the server runs it (its malloc settings) and untuned."""
    rows = [row for row in records("wire") if row["stage"] == "total"]
    if not rows:
        return ""
    lines = [
        "| 64 MiB of float32 tensors | malloc | ms | GB/s of tensors | peer | peer, ms |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        rate = "a view, no copy" if row["ours_ms"] < 1 else f"{row['gb_per_s']:.1f}"
        lines.append(
            f"| {row['direction']} | {_MALLOC[row['malloc']]} | {row['ours_ms']:.3g} | {rate} | "
            f"{row['peer']} | {row['peer_ms']:.3g} |"
        )
    return "\n".join([*lines, "", source(rows, "make bench-wire")])


_MALLOC = {"default": "as shipped by glibc", "served": "as the server sets it"}

_BACKWARD = ("conv_bwd_data", "maxpool2d_bwd")
_COLUMNS = [(ops, last) for ops in (_BACKWARD, ("grouped_conv_bwd_weight",)) for last in (0, 1)]


def cpu_table() -> str:
    """The CPU kernels beside PyTorch's, layer by layer, then the geometric means of the ratios."""
    rows = records("cpu")
    if not rows:
        return ""
    lines = [
        "| float32, batch 4, ms: ours / PyTorch | gradient of the input, NCHW | NHWC "
        "| gradient of the weight, NCHW | NHWC |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    plain = [row for row in rows if row["malloc"] == "default"]
    for layer in dict.fromkeys(row["layer"] for row in plain):
        cells = []
        for ops, last in _COLUMNS:
            found = [row for row in plain if row["layer"] == layer and row["op"] in ops]
            cells.append(
                f"{found[last]['ours_ms']:.2f} / {found[last]['peer_ms']:.2f}" if found else ""
            )
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    for malloc in dict.fromkeys(row["malloc"] for row in rows):
        for title, kinds in (("convolutions", None), ("pooling", "pool")):
            cells = []
            for ops, last in _COLUMNS:
                some = [
                    row
                    for row in rows
                    if row["malloc"] == malloc
                    and row["op"] in ops
                    and (row["class"] == "pool") == (kinds == "pool")
                ]
                ratios = [row["peer_ms"] / row["ours_ms"] for row in some[last::2]]
                cells.append(f"{statistics.geometric_mean(ratios):.2f}x" if ratios else "")
            lines.append(
                f"| **times as fast as PyTorch**, {title}, malloc {_MALLOC[malloc]} "
                f"| {' | '.join(cells)} |"
            )
    return "\n".join([*lines, "", source(rows, "make bench-cpu")])


def gpu_table() -> str:
    """The GPU kernels beside PyTorch's and the reference time: geometric means by class."""
    rows = records("gpu")
    if not rows:
        return ""
    ndim = {layer["name"]: layer["ndim"] for layer in json.loads(LAYERS.read_text())}
    groups: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        # PyTorch's 1D convolutions are slow enough to lift a mean that they are part of.
        kind = f"{row['class']}, 1D" if ndim[row["layer"]] == 1 else row["class"]
        dtype = "float32, true" if row.get("precision") == "highest" else row["dtype"]
        key = (kind, row["op"], dtype, row["layout"])
        groups.setdefault(key, []).append(row)
    lines = [
        "| class | operation | dtype | layout | layers | times as fast as PyTorch "
        "| over the reference time |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for names, some in sorted(groups.items()):
        faster = statistics.geometric_mean(row["peer_ms"] / row["ours_ms"] for row in some)
        over = statistics.geometric_mean(row["ours_ms"] / row["reference_ms"] for row in some)
        lines.append(f"| {' | '.join(names)} | {len(some)} | {faster:.2f}x | {over:.2f}x |")
    return "\n".join([*lines, "", source(rows, "make bench-gpu")])


def serve_table() -> str:
    """The whole way of a request beside the peer's: medians and how many times as fast."""
    rows = records("serve")
    if not rows:
        return ""
    columns = list(dict.fromkeys((row["size"], row["malloc"]) for row in rows))
    heads = [f"{size}, malloc {malloc}" for size, malloc in columns]
    lines = [
        f"| ms: ours / peer (times as fast) | peer | {' | '.join(heads)} |",
        f"| --- | --- |{' ---: |' * len(columns)}",
    ]
    for transport in dict.fromkeys(row["transport"] for row in rows):
        found = [row for row in rows if row["transport"] == transport]
        cells = [
            f"{row['ours_ms']:.3g} / {row['peer_ms']:.3g} ({row['peer_ms'] / row['ours_ms']:.2f}x)"
            for row in found
        ]
        peers = " or ".join(dict.fromkeys(row["peer"] for row in found))
        lines.append(f"| {transport} | {peers} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source(rows, "make bench-serve")])


def engine_gpu_table() -> str:
    """The whole server on a GPU: what an answer takes beside the bus that it travels over."""
    rows = records("engine_gpu")
    if not rows:
        return ""
    lines = [
        "| way | front ends | in flight | ms an answer | GB/s up | GB/s down "
        "| the bus alone, ms | share |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        # What lies on the GPU already does not travel; of HTTP the front ends' sockets are slower.
        travels = row["transport"].startswith("shared memory")
        bus = f"{row['reference_ms']:.2f}" if travels else ""
        share = f"{row['reference_ms'] / row['ours_ms']:.0%}" if travels else ""
        moved = not row["transport"].startswith(("stored", "CUDA"))
        rates = [f"{row[f'{way}_gb_per_s']:.2f}" if moved else "" for way in ("up", "down")]
        lines.append(
            f"| {row['transport']} | {row['front_ends']} | {row['in_flight']} "
            f"| {row['ours_ms']:.3g} | {rates[0]} | {rates[1]} | {bus} | {share} |"
        )
    return "\n".join([*lines, "", source(rows, "make bench-engine-gpu")])


def devices_table() -> str:
    """Several GPUs beside one."""
    rows = records("devices")
    if not rows:
        return ""
    lines = [
        f"{rows[0]['devices']} GPUs of one host beside one, through shared memory: requests side "
        "by side, a problem of a gigabyte split over them to the same bits, and requests while a "
        "worker is killed, of which none fails.",
        "",
        "| what | batch | in flight | devices | ms an answer | one device | times as fast |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['what']} | {row['batch']} | {row['in_flight']} | {row['devices']} "
        f"| {row['ours_ms']:.3g} | {row['peer_ms']:.3g} | {row['peer_ms'] / row['ours_ms']:.2f}x |"
        for row in rows
    ]
    return "\n".join([*lines, "", source(rows, "make bench-devices")])


TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    README: {
        "cpu": cpu_table,
        "gpu": gpu_table,
        "engine_gpu": engine_gpu_table,
        "devices": devices_table,
        "serve": serve_table,
        "wire": wire_table,
        "settings": markdown_table,
    },
    DEPLOY: {"how_far": load_tables.how_far_table},
    LOAD: {
        "load": load_tables.load_table,
        "ramp": load_tables.ramp_table,
        "soak": load_tables.soak_table,
        "ray": load_tables.ray_table,
        "ray_scaling": load_tables.ray_scaling_table,
        "ray_costs": load_tables.ray_costs_table,
    },
}


def rendered(document: Path) -> str:
    """The document's text with every table made afresh."""
    text = document.read_text(encoding="utf-8")
    for name, table in TABLES[document].items():
        before, mark, rest = text.partition(f"<!-- table: {name} -->\n")
        if mark:
            _, end, after = rest.partition("<!-- end -->")
            text = f"{before}{mark}{table().strip()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for document in TABLES:
        document.write_text(rendered(document), encoding="utf-8")
