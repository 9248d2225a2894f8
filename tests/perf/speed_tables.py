"""The tables of docs/speed.md, from `results/`; see `readme_tables`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from tests.perf.records import Record, records, source_line
from tests.perf.serve.shortcuts import SHORTCUTS

__all__ = [
    "cpu_means_table",
    "cpu_networks_table",
    "cpu_table",
    "devices_table",
    "engine_gpu_table",
    "gpu_table",
    "serve_remaining_table",
    "serve_short_table",
    "serve_shortcuts_table",
    "serve_table",
    "wire_table",
]

NAMES = ("layers", "transposed", "poolings")
SUITES = [Path(__file__).parent / "suite" / f"{name}.json" for name in NAMES]


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
    return "\n".join([*lines, "", source_line(rows, "make bench-wire")])


_MALLOC = {"default": "as shipped by glibc", "served": "as the server sets it"}

_BACKWARD = ("conv_bwd_data", "maxpool2d_bwd", "avg_pool_bwd")
_POOLS = ("pool", "average")
_COLUMNS = [(ops, last) for ops in (_BACKWARD, ("grouped_conv_bwd_weight",)) for last in (0, 1)]


def cpu_table() -> str:
    """CPU kernels compared with PyTorch's by layer, then the geometric means of the ratios."""
    rows = records("cpu")
    if not rows:
        return ""
    lines = [
        "| float32, batch 4, ms: ours / PyTorch | gradient of the input, NCHW | NHWC "
        "| gradient of the weight, NCHW | NHWC |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    shown = {op for ops, _ in _COLUMNS for op in ops}
    plain = [row for row in rows if row["malloc"] == "default" and row["op"] in shown]
    for layer in dict.fromkeys(row["layer"] for row in plain):
        cells = []
        for ops, last in _COLUMNS:
            found = [row for row in plain if row["layer"] == layer and row["op"] in ops]
            cells.append(
                f"{found[last]['ours_ms']:.2f} / {found[last]['peer_ms']:.2f}" if found else ""
            )
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    lines += _cpu_means(rows, bold=True)
    return "\n".join([*lines, "", source_line(rows, "make bench-cpu")])


def cpu_means_table() -> str:
    """The geometric means alone."""
    rows = records("cpu")
    if not rows:
        return ""
    lines = [
        "| float32, batch 4 | gradient of the input, NCHW | NHWC "
        "| gradient of the weight, NCHW | NHWC |",
        "| --- | ---: | ---: | ---: | ---: |",
        *_cpu_means(rows, bold=False),
    ]
    return "\n".join([*lines, "", source_line(rows, "make bench-cpu")])


def cpu_networks_table() -> str:
    """The layers of whole networks by class, operation and layout: the mean and the losses."""
    rows = records("cpu_networks")
    if not rows:
        return ""
    groups: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in rows:
        layout = "channels last" if row["layout"].endswith("C") else "channels first"
        ratio = row["peer_ms"] / row["ours_ms"]
        groups.setdefault((row["class"], row["op"], layout), []).append((ratio, row["layer"]))
    lines = [
        "| class | operation | layout | layers | times as fast as PyTorch, geometric mean "
        "| slower than 0.7x | the worst |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for (kind, op, layout), found in sorted(groups.items()):
        mean = statistics.geometric_mean(ratio for ratio, _ in found)
        slower = sum(ratio < 0.7 for ratio, _ in found)
        ratio, layer = min(found)
        lines.append(
            f"| {kind} | {op} | {layout} | {len(found)} | {mean:.2f}x | {slower} "
            f"| {ratio:.2f}x `{layer}` |"
        )
    return "\n".join([*lines, "", source_line(rows, "python -m tests.perf.bench_cpu_networks")])


def _cpu_means(rows: list[Record], *, bold: bool) -> list[str]:
    """A line for each kind of layer and way of allocating memory."""
    lines = []
    title = "**times as fast as PyTorch**, " if bold else ""
    for malloc in dict.fromkeys(row["malloc"] for row in rows):
        for kind, pools in (("convolutions", False), ("pooling", True)):
            cells = []
            for ops, last in _COLUMNS:
                some = [
                    row
                    for row in rows
                    if row["malloc"] == malloc
                    and row["op"] in ops
                    and (row["class"] in _POOLS) == pools
                ]
                cells.append(_ratio(some[last::2]))
            lines.append(f"| {title}{kind}, malloc {_MALLOC[malloc]} | {' | '.join(cells)} |")
    return lines


def _ratio(rows: list[Record]) -> str:
    """How many times as fast as the peer, by geometric mean; nothing where nothing was measured."""
    if not rows:
        return ""
    return f"{statistics.geometric_mean(row['peer_ms'] / row['ours_ms'] for row in rows):.2f}x"


def gpu_table() -> str:
    """The GPU kernels compared with PyTorch's and the reference time: geometric means by class."""
    return _gpu_table("gpu", "make bench-gpu")


def poolings_table() -> str:
    """The same of average, adaptive and un-pooling."""
    return _gpu_table("poolings", "python -m tests.perf.bench_gpu --suite poolings")


def _gpu_table(bench: str, command: str) -> str:
    rows = records(bench)
    if not rows:
        return ""
    lines = [
        "| class | operation | dtype | layout | layers | times as fast as PyTorch "
        "| over the reference time |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for names, some in sorted(_gpu_groups(rows).items()):
        over = statistics.geometric_mean(row["ours_ms"] / row["reference_ms"] for row in some)
        lines.append(f"| {' | '.join(names)} | {len(some)} | {_ratio(some)} | {over:.2f}x |")
    return "\n".join([*lines, "", source_line(rows, command)])


def _gpu_groups(rows: list[Record]) -> dict[tuple[str, str, str, str], list[Record]]:
    """The rows of each class, operation, dtype and layout."""
    layers = (layer for suite in SUITES for layer in json.loads(suite.read_text()))
    ndim = {layer["name"]: layer["ndim"] for layer in layers}
    groups: dict[tuple[str, str, str, str], list[Record]] = {}
    for row in rows:
        # PyTorch's 1D convolutions are slow enough to lift a mean that they are part of.
        kind = f"{row['class']}, 1D" if ndim[row["layer"]] == 1 else row["class"]
        dtype = "float32, true" if row.get("precision") == "highest" else row["dtype"]
        key = (kind, row["op"], dtype, row["layout"])
        groups.setdefault(key, []).append(row)
    return groups


def serve_table() -> str:
    """The whole way of a request compared with the peer's: medians and how many times as fast."""
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
        cells = map(_beside, found)
        peers = " or ".join(dict.fromkeys(row["peer"] for row in found))
        lines.append(f"| {transport} | {peers} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", source_line(rows, "make bench-serve")])


_SHORT = [
    "binary HTTP, SDK",
    "HTTP, tritonclient",
    "gRPC, tritonclient",
    "shared memory, SDK",
    "shared memory over HTTP, tritonclient",
    "JSON, SDK",
]


def serve_short_table() -> str:
    """The ways that clients take most, both sides with malloc tuned."""
    rows = [row for row in records("serve") if row["malloc"] == "tuned"]
    if not rows:
        return ""
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    lines = [
        f"| ms: ours / peer (times as fast) | {' | '.join(sizes)} | peer |",
        f"| --- |{' ---: |' * len(sizes)} --- |",
    ]
    for transport in _SHORT:
        found = [row for row in rows if row["transport"] == transport]
        cells = " | ".join(map(_beside, found))
        lines.append(f"| {transport} | {cells} | {found[0]['peer']} |")
    return "\n".join([*lines, "", source_line(rows, "make bench-serve")])


def _beside(row: Record) -> str:
    """Ours, the peer's, and how many times as fast."""
    ours, peer = row["ours_ms"], row["peer_ms"]
    return f"{ours:.3g} / {peer:.3g} ({peer / ours:.2f}x)"


def serve_remaining_table() -> str:
    """What a request of 1 KiB takes: the libraries alone, ours and Triton."""
    rows = [row for row in records("serve_small") if row["part"] == "remaining"]
    if not rows:
        return ""
    lines = ["| what answers | HTTP, ms | gRPC, ms |", "| --- | ---: | ---: |"]
    for server, text in _SERVERS.items():
        found = {row["transport"]: row["ms"] for row in rows if row["server"] == server}
        lines.append(f"| {text} | {found['HTTP']:.2f} | {found['gRPC']:.2f} |")
    return "\n".join([*lines, "", source_line(rows, "make bench-serve")])


_SERVERS = {
    "library": "the library alone with a ready answer: uvicorn; grpc.aio (bytes, without "
    "tritonclient)",
    "event loop": "this server, computing on the event loop",
    "worker": "this server, by a worker",
    "Triton": "Triton",
}


def serve_shortcuts_table() -> str:
    """How much longer a request takes without each shortcut: ratios of first quartiles."""
    rows = [row for row in records("serve_small") if row["part"] == "shortcuts"]
    if not rows:
        return ""
    lines = [
        "| what | time without it, relative | by the Open Inference Protocol |",
        "| --- | ---: | ---: |",
    ]
    for name, shortcut in SHORTCUTS.items():
        found = [row for row in rows if row["shortcut"] == name]
        cells = [f"{row['without_quartiles_ms'][0] / row['quartiles_ms'][0]:.2f}" for row in found]
        lines.append(f"| {shortcut.text} | {' | '.join([*cells, ''][:2])} |")
    source = source_line(rows, "make bench-serve").replace("medians", "first quartiles")
    return "\n".join([*lines, "", source])


def engine_gpu_table() -> str:
    """The whole server on a GPU: the time of an answer, and that of its transfer over the bus."""
    rows = records("engine_gpu")
    if not rows:
        return ""
    lines = [
        "| way | front ends | in flight | ms an answer | GB/s up | GB/s down "
        "| that way alone, ms | share |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        # What lies on the GPU already does not travel; over HTTP it is sockets that bound it.
        alone_ms = {
            "shared memory, SDK": row["reference_ms"],
            "binary HTTP, SDK": row["peer_ms"],
        }.get(row["transport"])
        way = f"{alone_ms:.3g}" if alone_ms else ""
        share = f"{alone_ms / row['ours_ms']:.0%}" if alone_ms else ""
        moved = not row["transport"].startswith(("stored", "CUDA"))
        rates = [f"{row[f'{to}_gb_per_s']:.2f}" if moved else "" for to in ("up", "down")]
        lines.append(
            f"| {row['transport']} | {row['front_ends']} | {row['in_flight']} "
            f"| {row['ours_ms']:.3g} | {rates[0]} | {rates[1]} | {way} | {share} |"
        )
    return "\n".join([*lines, "", source_line(rows, "make bench-engine-gpu")])


def devices_table() -> str:
    """Several GPUs compared with one."""
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
    return "\n".join([*lines, "", source_line(rows, "make bench-devices")])
