"""Cost model of hopper_weight.cu's partitions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.hopper_weight_tiles import (
    ITEM_BYTES,
    PIXELS,
    ROWS,
    Cut,
    WeightTile,
)
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["expected_s", "launch_s", "lines"]

# Constants of an H200, fitted to tests/perf's dense layers, in order by line:
# a launch, a tensor-core cycle, bytes/s to shared memory;
# a box with four producer threads, a multicast box, and the fraction of the shorter of compute and
# copies that is not overlapped;
# bytes/s of writing partial sums, the second kernel, and its bytes/s;
# a cluster reduction, the bytes/s that a block receives, and a grid reduction (besides its bytes).
LAUNCH_S, CYCLE_S, COPIED_BYTES_PER_S = 5.2e-6, 1 / 1.82e9, 8.4e12
BOX_S, SHARED_BOX_S, BESIDE = 45e-9, 8e-9, 0.12
PARTIAL_BYTES_PER_S, SUM_S, SUM_BYTES_PER_S = 3.6e12, 6.3e-6, 6.0e12
CLUSTER_SUM_S, CLUSTER_BYTES_PER_S, TOGETHER_S = 2.0e-6, 30e9, 4.2e-6
# From these to the time of a launch in a graph, fitted on an H200 to random layers.
START_S, SCALE = 1.8e-6, 1.05


def expected_s(cut: Cut, device: CudaDevice) -> float:
    """Return the expected seconds of a partition on an H200; on other GPUs, only a ranking."""
    tile, blocks, parted_tiles = cut.tile, device.multiprocessors, cut.parted
    busy = cut.blocks(device)
    step_s = _step_s(tile, cut.boxes, cut.box_pixels, cut.copying, cut.rows_first, busy)
    partial_s = tile.sums * 4 * busy / PARTIAL_BYTES_PER_S
    seconds = LAUNCH_S
    if cut.sums:
        seconds += ceil_div(cut.steps, cut.shares * cut.summing) * step_s
        got = tile.sums * 4 * (cut.summing - 1) / cut.summing
        seconds += CLUSTER_SUM_S + got / CLUSTER_BYTES_PER_S
        if parted_tiles:
            seconds += partial_s / cut.summing
    else:
        whole = ceil_div(cut.whole, blocks)
        parted = ceil_div(parted_tiles * cut.shares, blocks)
        seconds += (whole * cut.steps + parted * ceil_div(cut.steps, cut.shares)) * step_s
        seconds += parted * partial_s
    if parted_tiles:
        seconds += (TOGETHER_S if cut.together else SUM_S) + cut.partial_bytes / SUM_BYTES_PER_S
    return seconds


@lru_cache(maxsize=256)
def _step_s(
    tile: WeightTile, boxes: int, box_pixels: int, copying: int, rows_first: bool, busy: int
) -> float:
    """Return the seconds of a k-tile with so many busy blocks. Cached, as the partitions of a tile
    differ mostly in their splits."""
    x_bytes = boxes * box_pixels * tile.channels * ITEM_BYTES
    y_bytes = tile.row_boxes * ROWS * tile.pixels * ITEM_BYTES
    if rows_first:
        copied_bytes, copied_boxes = x_bytes // copying + y_bytes, boxes / copying + tile.row_boxes
    else:
        copied_bytes, copied_boxes = x_bytes + y_bytes // copying, boxes + tile.row_boxes / copying
    copied_bytes, copied_boxes = tile.parts * copied_bytes, tile.parts * copied_boxes
    products = tile.step_cycles * CYCLE_S
    copies = max(copied_bytes * busy / COPIED_BYTES_PER_S, copied_boxes * BOX_S)
    step_s = max(products, copies) + BESIDE * min(products, copies)
    if copying > 1:
        step_s += SHARED_BOX_S * (boxes if rows_first else tile.row_boxes)
    return step_s


def launch_s(busy_s: float) -> float:
    """Return the expected seconds of a launch in a graph."""
    return START_S + SCALE * busy_s


def lines(
    work: ConvWork, device: CudaDevice, found: Sequence[tuple[float, Cut]]
) -> NDArray[np.float64]:
    """Return the `features` of partitions with their expected seconds."""
    cuts = [cut for _, cut in found]
    return features(
        expected_s=[time_s for time_s, _ in found],
        rows=work.out_channels,
        columns=work.taps * work.in_channels,
        depth=work.pixels,
        m=[cut.tile.row_boxes * ROWS for cut in cuts],
        n=[cut.tile.blocks * cut.tile.channels for cut in cuts],
        k=PIXELS,
        inner=[cut.summing for cut in cuts],
        outer=[cut.shares for cut in cuts],
        workers=device.multiprocessors,
        moved=work.elements * work.dtype.itemsize,
        kind=[cut.together + 2 * (cut.copying > 1) for cut in cuts],
        order=[cut.shared_taps for cut in cuts],
    )
