"""The shares of grouped_weight.cu to choose from, and their expected times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod

from convgrad_service.backends.cuda.kernels.grouped.grouped_box import MOST_BOX, Size4
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    is_exact,
    merge_of,
    slices_of,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight_blocks import (
    HALF_ITEMS,
    ITEMS,
    Block,
    Item,
    Parts,
    Share,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ZEROS_BYTES, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["best_of", "shares_of", "time_of"]

STAGES, ENGINE_STAGES = (4, 3, 2), (8, 6, 4, 3, 2)
STATIC_BYTES, MOST_CLUSTER = 1024, 8
MOST_SPLITS = 255
"""The most blocks that can share a result: the rendezvous counter has eight bits for each count."""
PARTIAL_BYTES = 64 * 2**20
"""The most bytes of partial sums, unless the caller asks for more splits."""
FEW_BOXES = 8
"""Up to this number of boxes, one block may process all."""


def best_of(work: ConvWork, device: CudaDevice, engine: bool) -> Share | None:
    """Return the share with the least expected time, of those nearest to the splits asked for; None
    if there is none."""

    def key(one: tuple[float, Share]) -> tuple[int, float]:
        expected, share = one
        return 0 if work.split_k is None else abs(work.split_k - share.splits), expected

    return min(shares_of(work, device, engine), key=key, default=(0.0, None))[1]


@lru_cache(maxsize=32)
def shares_of(work: ConvWork, device: CudaDevice, engine: bool) -> tuple[tuple[float, Share], ...]:
    """Return candidates with their expected times."""
    return tuple(_shares_of(work, device, engine))


def _shares_of(work: ConvWork, device: CudaDevice, engine: bool) -> Iterator[tuple[float, Share]]:
    together = all(
        operand.strides[1] == channels
        for operand, channels in ((work.x, work.in_channels), (work.y, work.out_channels))
    )
    levels = {prod(work.kernel[:level]): level for level in (2, 1, 0)}
    for level in sorted(levels.values()):
        tiles: list[Size4] = []
        for item in items_of(work):
            parts = Parts(work, item, level, engine)
            tiles = tiles or parts.best_tiles()
            for slice_, tile in product(slices_of(parts.merge, together), tiles):
                block = Block(parts, tile, slice_)
                if engine and max(block.x_pitch, block.y_pitch) > MOST_BOX * work.dtype.itemsize:
                    continue
                if not engine and block.pieces > item.warps * 32:
                    continue
                columns, sums = prod(block.grid), block.items * item.sums
                boxes = parts.boxes(tile)
                for stages, resident in _stages(parts, block, device):
                    at_once = device.multiprocessors * resident
                    for splits in _splits_of(work, columns, sums, boxes, at_once):
                        # No more stages than boxes.
                        used = min(stages, max(STAGES[-1], ceil_div(boxes, splits)))
                        share = Share(tile, slice_, item, level, used, splits)
                        yield time_of(parts, block, share, device), share
                        clustered = _in_cluster(parts, block, share, device)
                        if clustered is not None:
                            yield time_of(parts, block, clustered, device), clustered


def _in_cluster(parts: Parts, block: Block, share: Share, device: CudaDevice) -> Share | None:
    """Return the share with the splits of a slice in a cluster, if they can be."""
    if not parts.engine or not 1 < share.splits <= MOST_CLUSTER:
        return None
    room = device.shared_bytes_per_block - STATIC_BYTES
    every = range(share.stages, 1, -1)
    stages = next((n for n in every if block.total_bytes(n, share.splits) <= room), None)
    return None if stages is None else replace(share, stages=stages, in_cluster=True)


def items_of(work: ConvWork) -> list[Item]:
    """Return the warp tiles to compare: one of each height, of the best width."""
    merge = merge_of(work)
    columns, half = ceil_div(merge.out_channels, 8), work.dtype.itemsize == 2
    found: dict[int, Item] = {}
    for item in HALF_ITEMS if half else ITEMS:
        best = found.setdefault(item.rows, item)
        # Each pass reads the other operand again, which costs as much as 1.5 unused columns.
        cost, least = (ceil_div(columns, one.columns) * (one.columns + 1.5) for one in (item, best))
        if cost < least:
            found[item.rows] = item
    return list(found.values())


def _splits_of(work: ConvWork, columns: int, sums: int, boxes: int, at_once: int) -> list[int]:
    """Return numbers of splits that fill the device or a part of it, unless the caller sets it.

    Parameters
    ----------
    columns
        Blocks of a split.
    sums
        Of a block.
    at_once
        Blocks that the device runs at once.
    """
    if columns > ZEROS_BYTES // 4:
        return [1]
    if work.split_k is not None:
        return [max(1, min(work.split_k, boxes, MOST_SPLITS))]
    most = min(boxes, MOST_SPLITS, max(1, PARTIAL_BYTES // (columns * sums * 4)))
    found = {1: None} if boxes <= FEW_BOXES else {}
    for part in (1, 2, 4, 8):
        wanted = min(most, max(1, at_once // part // columns))
        # The fewest splits that do not increase the boxes per block.
        found[ceil_div(boxes, ceil_div(boxes, wanted))] = None
    return list(found)


def _stages(parts: Parts, block: Block, device: CudaDevice) -> Iterator[tuple[int, int]]:
    """Yield the most stages for each number of blocks that are resident on an SM."""
    seen: set[int] = set()
    for stages in ENGINE_STAGES if parts.engine else STAGES:
        if block.total_bytes(stages) <= device.shared_bytes_per_block - STATIC_BYTES:
            resident = _resident(parts, block.total_bytes(stages), device)
            if resident not in seen:
                seen.add(resident)
                yield stages, resident


def _resident(parts: Parts, shared_bytes: int, device: CudaDevice) -> int:
    return max(1, min(parts.item.blocks, device.fitting_blocks(shared_bytes)))


# Cost model, in microseconds on an H200: of a launch; of a block, or of several that run on one SM
# at once; of a box; of a warp's step, and of a product in it; of a step of an SM's warps, and of a
# fragment that it reads; of adding a byte of sums in shared memory, and of storing it; of meeting
# other blocks, each of them, and of a byte of partial sums; of adding over a cluster, and of a byte
# of that. With EXACT, a product is many FMAs. Fitted to 794 measurements in bfloat16, of 122 layers
# (tests/perf/random_grouped.py, seeds 909, 4242 and 31337, and the networks suite). Fitted to every
# other layer, it errs by 7 % on the others, and the shares chosen there take 1.02 of the time of
# the fastest ones measured.
LAUNCH_US, BLOCKS_US, BOX_US = 4.12, 1.58, 0.116
STEP_US, PRODUCT_US, SM_STEP_US, SM_READ_US = 0.0728, 5.81e-3, 1.05e-3, 2.11e-3
EXACT_STEP_US, EXACT_US, EXACT_SM_US = 0.3, 0.039, 5.3e-3
SLAB_US, SUM_US, MEET_US, SHARE_US, PARTIAL_US = 2.24e-5, 3.28e-5, 2.67, 0.063, 1.82e-5
CLUSTER_US, RECEIVED_US = 0.417, 2.22e-5
# Of copying a pixel, and a byte; and of a byte of device memory: in 16-bit types by the copy
# engine, and otherwise.
ENGINE_US, COPY_US = (0.0, 1.06e-5, 2.04e-7), (1.24e-3, 1.76e-5, 3.35e-7)
# How much more a byte of device memory takes in narrow pixels, and a byte copied or of memory where
# pixels do not start with whole sectors.
NARROW_BYTES, NARROW, ALIGNED_BYTES, UNALIGNED = 128, 1.29, 64, 1.6
CLUSTER_SMS = 16
"""SMs, of 17, among which a cluster lies; 30 clusters of four and 15 of eight run at once."""
PLANES = 1.14
"""With taps along D. Fitted to two such layers."""


def time_of(parts: Parts, block: Block, share: Share, device: CudaDevice) -> float:
    """Return the expected time of a share, in seconds."""
    item, splits = parts.item, share.splits
    shared_bytes = block.total_bytes(share.stages, splits if share.in_cluster else 0)
    resident, sms = _resident(parts, shared_bytes, device), device.multiprocessors
    if share.in_cluster:
        # An SM that holds more than one block holds those of more clusters.
        clusters = sms * (CLUSTER_SMS * resident // splits) // (CLUSTER_SMS + 1)
        sms = max(1, clusters * splits // resident)
    each = ceil_div(prod(block.grid) * splits, sms)
    waves, turns = ceil_div(each, resident), ceil_div(parts.boxes(share.tile), splits)
    fast = parts.engine and parts.work.dtype.itemsize == 2
    pixel_us, copied_us, memory_us = ENGINE_US if fast else COPY_US
    slowed = UNALIGNED if fast and block.row_alignment < ALIGNED_BYTES else 1.0
    bytes_ = block.box_bytes if parts.engine else block.copied_bytes
    copied = each * turns * (block.pixels * pixel_us + bytes_ * copied_us) * slowed
    steps = ceil_div(block.steps, block.k_splits)
    products, reads = item.rows * item.columns, item.rows + item.columns / 2
    all_steps = each * turns * steps * block.items * block.k_splits
    if is_exact(parts.work):
        in_warp = waves * turns * steps * (EXACT_STEP_US + products * EXACT_US)
        in_sm = all_steps * products * EXACT_SM_US
    else:
        in_warp = waves * turns * steps * (STEP_US + products * PRODUCT_US)
        in_sm = all_steps * (SM_STEP_US + reads * SM_READ_US)
    memory_bytes = parts.work.elements * parts.work.dtype.itemsize
    narrow = fast and min(block.x_pitch, block.y_pitch) < NARROW_BYTES
    memory = memory_bytes * memory_us * slowed * (NARROW if narrow else 1.0)
    loop: float = (copied**3 + in_warp**3 + in_sm**3 + memory**3) ** (1 / 3)
    sums = block.items * item.sums * 4
    added = each * sums * (block.k_splits * SLAB_US + SUM_US)
    own = each * sums / parts.merge.groups
    if share.in_cluster:
        added += CLUSTER_US + own * RECEIVED_US
    elif splits > 1:
        added += MEET_US + splits * SHARE_US + own * PARTIAL_US
    whole = LAUNCH_US + waves * (BLOCKS_US + turns * BOX_US) + loop + added
    return whole * (PLANES if parts.work.kernel[0] > 1 else 1.0) * 1e-6
