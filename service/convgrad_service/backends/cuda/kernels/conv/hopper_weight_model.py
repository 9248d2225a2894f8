"""Cost model of hopper_weight.cu's partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.hopper_weight_cuts import Cut
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_tiles import (
    PIXELS,
    ROWS,
    WeightTile,
)
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["TF32", "expected_s", "launch_s", "lines"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Constants of an H200, in seconds and bytes.

    Attributes
    ----------
    launch_s, cycle_s, copied_bytes_per_s
        A launch, a cycle of a k-tile's products, and copies to shared memory.
    box_s, shared_box_s
        A box with four producer threads, and what multicast adds for one.
    beside
        The fraction of the shorter of products and copies that is not overlapped.
    partial_bytes_per_s, sum_s, sum_bytes_per_s
        Writing partial sums, the second kernel, and reading them.
    cluster_sum_s, cluster_bytes_per_s
        A cluster reduction, and what a block receives.
    together_s
        A grid reduction, besides its bytes.
    """

    launch_s: float
    cycle_s: float
    copied_bytes_per_s: float
    box_s: float
    shared_box_s: float
    beside: float
    partial_bytes_per_s: float
    sum_s: float
    sum_bytes_per_s: float
    cluster_sum_s: float
    cluster_bytes_per_s: float
    together_s: float


# Fitted to tests/perf's dense layers.
IN_16_BITS = Rates(
    launch_s=5.2e-6,
    cycle_s=1 / 1.82e9,
    copied_bytes_per_s=8.4e12,
    box_s=45e-9,
    shared_box_s=8e-9,
    beside=0.12,
    partial_bytes_per_s=3.6e12,
    sum_s=6.3e-6,
    sum_bytes_per_s=6.0e12,
    cluster_sum_s=2.0e-6,
    cluster_bytes_per_s=30e9,
    together_s=4.2e-6,
)
# Fitted to 2,799 partitions of 383 networks' and random layers at batches 1 to 64: the expected
# time errs by 8 %, and the choice costs 3.6 %; fitted to half of the layers, by 9 % and 3.4 % on
# the other half.
TF32 = Rates(
    launch_s=6.34e-6,
    cycle_s=5.31e-10,
    copied_bytes_per_s=7.6e12,
    box_s=0.0,
    shared_box_s=8e-9,
    beside=0.188,
    partial_bytes_per_s=2.43e12,
    sum_s=1.54e-6,
    sum_bytes_per_s=12.6e12,
    cluster_sum_s=1.89e-6,
    cluster_bytes_per_s=28.3e9,
    together_s=1.77e-6,
)
# From these to the time of a launch in a graph, fitted on an H200 to random layers.
START_S, SCALE = 1.8e-6, 1.05


def expected_s(cut: Cut, device: CudaDevice) -> float:
    """Return the expected seconds of a partition on an H200; on other GPUs, only a ranking."""
    tile, blocks, parted_tiles = cut.tile, device.multiprocessors, cut.parted
    rates = _rates(tile)
    busy = cut.blocks(device)
    step_s = _step_s(tile, cut.boxes, cut.box_pixels, cut.copying, cut.rows_first, busy)
    partial_s = tile.sums * 4 * busy / rates.partial_bytes_per_s
    seconds = rates.launch_s
    if cut.sums:
        seconds += ceil_div(cut.steps, cut.shares * cut.summing) * step_s
        got = tile.sums * 4 * (cut.summing - 1) / cut.summing
        seconds += rates.cluster_sum_s + got / rates.cluster_bytes_per_s
        if parted_tiles:
            seconds += partial_s / cut.summing
    else:
        whole = ceil_div(cut.whole, blocks)
        parted = ceil_div(parted_tiles * cut.shares, blocks)
        seconds += (whole * cut.steps + parted * ceil_div(cut.steps, cut.shares)) * step_s
        seconds += parted * partial_s
    if parted_tiles:
        seconds += rates.together_s if cut.together else rates.sum_s
        seconds += cut.partial_bytes / rates.sum_bytes_per_s
    return seconds


def _rates(tile: WeightTile) -> Rates:
    return TF32 if tile.tf32 else IN_16_BITS


@lru_cache(maxsize=256)
def _step_s(
    tile: WeightTile, boxes: int, box_pixels: int, copying: int, rows_first: bool, busy: int
) -> float:
    """Return the seconds of a k-tile with so many busy blocks. Cached, as the partitions of a tile
    differ mostly in their splits."""
    rates = _rates(tile)
    x_bytes = boxes * box_pixels * tile.channels * tile.item_bytes
    y_bytes = tile.row_boxes * ROWS * tile.pixels * tile.item_bytes
    if rows_first:
        copied_bytes, copied_boxes = x_bytes // copying + y_bytes, boxes / copying + tile.row_boxes
    else:
        copied_bytes, copied_boxes = x_bytes + y_bytes // copying, boxes + tile.row_boxes / copying
    copied_bytes, copied_boxes = tile.parts * copied_bytes, tile.parts * copied_boxes
    products = tile.step_cycles * rates.cycle_s
    copies = max(copied_bytes * busy / rates.copied_bytes_per_s, copied_boxes * rates.box_s)
    step_s = max(products, copies) + rates.beside * min(products, copies)
    if copying > 1:
        step_s += rates.shared_box_s * (boxes if rows_first else tile.row_boxes)
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
        rows=work.conv.out_channels,
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
