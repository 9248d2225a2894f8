"""The tables of whole networks on a GPU, from `results/`; see `readme_tables`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.perf.records import Record, records, source_line

__all__ = [
    "NAMES",
    "host_table",
    "losses_table",
    "network_classes_table",
    "network_sums",
    "network_types_table",
    "networks_table",
    "other_networks_table",
    "training_short_table",
    "training_table",
]

SUITE = Path(__file__).parent / "suite" / "networks.json"
TIMES = ("ours_ms", "peer_ms", "reference_ms")
# A layer counts as slower than the peer from here on; less is noise.
SLOWER = 0.95
SMALL_MS = 0.002
NAMES = {
    "resnet50": "ResNet-50",
    "resnext50_32x4d": "ResNeXt-50 32x4d",
    "mobilenetv3_large_100": "MobileNetV3-Large",
    "mobilenetv3_large": "MobileNetV3-Large",
    "efficientnet_b0": "EfficientNet-B0",
    "convnext_tiny": "ConvNeXt-T",
    "regnety_3_2gf": "RegNetY-3.2GF",
    "densenet121": "DenseNet-121",
    "ghostnet_100": "GhostNet",
    "r3d_18": "R3D-18",
    "tvs:deeplabv3_resnet50": "DeepLabV3, ResNet-50",
    "tvv:r3d_18": "R3D-18",
    "tvv:r2plus1d_18": "R(2+1)D-18",
    "ta:wav2vec2_base": "wav2vec 2.0 base",
}


def network_sums() -> dict[tuple[str, int], dict[str, float]]:
    """The times of both gradients of all convolutions of a network, by network and batch.

    Each layer counts as often as the network has it. Batches of which a layer was not measured are
    left out.
    """
    layers: dict[str, set[str]] = {}
    for layer in json.loads(SUITE.read_text(encoding="utf-8")):
        for network in layer["networks"]:
            layers.setdefault(network, set()).add(layer["name"])
    found: dict[tuple[str, int], list[tuple[int, Record]]] = {}
    for row in records("networks"):
        for network, count in row["networks"].items():
            found.setdefault((network, row["batch"]), []).append((count, row))
    return {
        key: {time: sum(count * row[time] for count, row in rows) for time in TIMES}
        for key, rows in sorted(found.items())
        if len(rows) == 2 * len(layers[key[0]])  # the gradients of input and weight
    }


def networks_table() -> str:
    """Whole networks compared with cuDNN, a column for each batch."""
    rows, sums = records("networks"), network_sums()
    if not rows:
        return ""
    batches = sorted({batch for _, batch in sums})
    lines = [
        f"| ms: ours / cuDNN (times as fast) | {_heads(f'batch {batch}' for batch in batches)}",
        f"| --- |{' ---: |' * len(batches)}",
    ]
    for network in dict.fromkeys(network for network, _ in sums):
        found = [sums.get((network, batch)) for batch in batches]
        cells = [_beside(one["ours_ms"], one["peer_ms"]) if one else "" for one in found]
        lines.append(f"| {NAMES[network]} | {_heads(cells)}")
    # Not the mean, which the one network of 1D convolutions would lift.
    medians = [
        statistics.median(
            one["peer_ms"] / one["ours_ms"] for (_, of), one in sums.items() if of == batch
        )
        for batch in batches
    ]
    lines.append(f"| median | {_heads(f'{median:.2f}x' for median in medians)}")
    return "\n".join([*lines, "", source_line(rows, "make bench-networks"), "", _losses(rows)])


def _losses(rows: list[Record]) -> str:
    """Say how many dense layers, the class with most losses, are slower than the peer's."""
    ratios: dict[int, list[float]] = {}
    for row in rows:
        if row["class"] == "dense":
            ratios.setdefault(row["batch"], []).append(row["peer_ms"] / row["ours_ms"])
    shares = ", ".join(
        f"{sum(ratio < SLOWER for ratio in found) / len(found):.0%} at batch {batch}"
        for batch, found in sorted(ratios.items())
    )
    mean = statistics.geometric_mean(ratio for found in ratios.values() for ratio in found)
    return (
        "Not everything is faster. The share of dense layers that are more than "
        f"{1 - SLOWER:.0%} slower: {shares} (geometric mean of all: {mean:.2f}x). A network has "
        "no figure for a batch at which one of its layers was not measured."
    )


def network_classes_table() -> str:
    """The layers of all networks by class, operation and batch: the mean and the losses."""
    rows = records("networks")
    if not rows:
        return ""
    slow = [row for row in rows if row["peer_ms"] < SLOWER * row["ours_ms"]]
    said = (
        f"Of {len(rows)} rows, {len(slow)} are over {1 - SLOWER:.0%} slower; "
        f"{sum(row['ours_ms'] - row['peer_ms'] <= SMALL_MS for row in slow)} of these lose at most "
        f"{SMALL_MS * 1e3:.0f} µs."
    )
    table = _by_group(rows, ("class", "operation", "batch"), _class_of)
    return "\n".join([said, "", *table, "", source_line(rows, "make bench-networks")])


def network_types_table() -> str:
    """The layers of all networks in other dtypes and layouts: the mean and the losses."""
    rows = records("network_types")
    if not rows:
        return ""
    table = _by_group(rows, ("dtype", "layout", "class", "operation"), _type_of)
    return "\n".join([*table, "", source_line(rows, "make bench-networks")])


def other_networks_table() -> str:
    """A sample of layers of networks that nothing was tuned for, in all types."""
    rows = records("other_networks")
    if not rows:
        return ""
    table = _by_group(rows, ("dtype", "layout", "class", "operation"), _type_of)
    return "\n".join([*table, "", source_line(rows, "make bench-networks")])


def _class_of(row: Record) -> tuple[str, ...]:
    return row["class"], row["op"], f"{row['batch']}"


def _type_of(row: Record) -> tuple[str, ...]:
    precision = row.get("precision")
    dtype = row["dtype"] + (f", `{precision}`" if precision else "")
    return dtype, row["layout"], row["class"], row["op"]


def _by_group(
    rows: Iterable[Record], heads: Iterable[str], group_of: Callable[[Record], tuple[str, ...]]
) -> list[str]:
    """A line for each group of rows: the peer's time over ours, and the layers that are slower."""
    groups: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append((row["peer_ms"] / row["ours_ms"], row["layer"]))
    names = list(heads)
    lines = [
        f"| {' | '.join(names)} | layers | times as fast as cuDNN, geometric mean "
        f"| share of layers slower than {SLOWER}x | the worst |",
        f"|{''.join(' ---: |' if name == 'batch' else ' --- |' for name in names)} ---: | ---: "
        "| ---: | --- |",
    ]
    for group, found in sorted(groups.items(), key=_numbers_in_order):
        mean = statistics.geometric_mean(ratio for ratio, _ in found)
        slower = sum(ratio < SLOWER for ratio, _ in found) / len(found)
        ratio, layer = min(found)
        lines.append(
            f"| {' | '.join(group)} | {len(found)} | {mean:.2f}x | {slower:.0%} "
            f"| {ratio:.2f}x `{layer}` |"
        )
    return lines


def _numbers_in_order(item: tuple[tuple[str, ...], object]) -> list[tuple[int, str]]:
    return [(int(text) if text.isdigit() else 0, text) for text in item[0]]


_TRAINING = (
    "A whole training step (forward, backward, optimizer; bfloat16 autocast, channels last), with "
    "`use(Local())` and without"
)
# Rows without the last key are older than the native kernels, and their eager steps of PyTorch's
# went through overrides in Python.
_WAYS = (("CUDA graph", "ours_ms", "peer_ms"), ("eager", "ours_eager_ms", "peer_alone_eager_ms"))


def _training() -> list[Record]:
    """The last row of each network and batch, in order: the benchmark appends."""
    last = {(row["network"], row["batch"]): row for row in records("training")}
    return [last[key] for key in sorted(last)]


def _ways(rows: list[Record]) -> list[tuple[str, str, str]]:
    """The ways that were measured."""
    return [way for way in _WAYS if any(way[-1] in row for row in rows)]


def _timed(row: Record, ours: str, peer: str) -> str:
    return _beside(row[ours], row[peer]) if peer in row else ""


def training_short_table() -> str:
    """How many times as fast a training step is; a row for each network."""
    rows = _training()
    if not rows:
        return ""
    columns = [
        (batch, *way) for batch in sorted({row["batch"] for row in rows}) for way in _ways(rows)
    ]
    heads = _heads(f"batch {batch}, {way}" for batch, way, _, _ in columns)
    lines = [
        f"{_TRAINING}; times as fast as PyTorch alone:",
        "",
        f"| network | {heads}",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    by_name = {(row["network"], row["batch"]): row for row in rows}
    for network in dict.fromkeys(row["network"] for row in rows):
        found = [(by_name.get((network, batch)), ours, peer) for batch, _, ours, peer in columns]
        cells = [
            f"{row[peer] / row[ours]:.2f}x" if row and peer in row else ""
            for row, ours, peer in found
        ]
        lines.append(f"| {NAMES[network]} | {_heads(cells)}")
    return "\n".join([*lines, "", source_line(rows, "make bench-training")])


def training_table() -> str:
    """The milliseconds of training steps, and what they left to PyTorch."""
    rows = _training()
    if not rows:
        return ""
    ways = _heads(way for way, _, _ in _ways(rows))
    lines = [
        f"{_TRAINING}; ms: ours / PyTorch's (times as fast).",
        "",
        f"| network | batch | {ways} calls left to PyTorch |",
        f"| --- | ---: |{' ---: |' * len(_ways(rows))} ---: |",
    ]
    lines += [
        f"| {NAMES[row['network']]} | {row['batch']} "
        f"| {_heads(_timed(row, ours, peer) for _, ours, peer in _ways(rows))} "
        f"{row['left_to_peer']} |"
        for row in rows
    ]
    return "\n".join([*lines, "", source_line(rows, "make bench-training")])


def host_table() -> str:
    """What a backward pass costs the host."""
    rows = list({row["call"]: row for row in records("host")}.values())
    if not rows:
        return ""
    lines = [
        "Microseconds of the host from one call of ATen's operator in Python to the next, small "
        f"bfloat16 layers in channels last, on the GPU's machine ({rows[0]['cpu']}). Inside our "
        "kernel, the plan is looked up, the outputs allocated, the arguments filled in and the "
        "launches enqueued; the rest is PyTorch's way to a kernel. PyTorch's were timed before "
        "the first `use`.",
        "",
        "| backward pass | ours | ours, tensors elsewhere | inside our kernel | PyTorch's |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['call']} | {row['ours_us']:.1f} | {row['other_addresses_us']:.1f} "
        f"| {row['inside_us']:.1f} | {row['peer_us']:.1f} |"
        for row in rows
    ]
    return "\n".join([*lines, "", source_line(rows, "make bench-host")])


def losses_table() -> str:
    """How far the losses of training runs are apart."""
    rows = records("losses")[-1:]
    if not rows:
        return ""
    (row,) = rows
    lines = [
        f"Losses of a ResNet-50 over {row['steps']} steps (bfloat16 autocast, batch "
        f"{row['batch']}): {len(row['peers'])} runs of PyTorch's that differ in the order of "
        f"their sums alone ({', '.join(row['peers'])}), and one with `use(Local())`.",
        "",
        "| root mean square difference of two loss curves | |",
        "| --- | ---: |",
        f"| PyTorch's runs, the two farthest apart | {row['peer_spread']:.3f} |",
        f"| with `use(Local())`, from the nearest of them | {row['apart']:.3f} |",
        f"| with `use(Local())`, from the farthest of them | {row['apart_most']:.3f} |",
    ]
    return "\n".join([*lines, "", source_line(rows, "make bench-losses")])


def _heads(cells: Iterable[str]) -> str:
    """The rest of a line of a table."""
    return " | ".join(cells) + " |"


def _beside(ours_ms: float, peer_ms: float) -> str:
    """Ours, the peer's, and how many times as fast."""
    return f"{ours_ms:.3g} / {peer_ms:.3g} ({peer_ms / ours_ms:.2f}x)"
