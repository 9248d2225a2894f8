"""Cost model of implicit_gemm, which chooses its tile and splits.

The constants were fitted on an H200 to half of 250 random layers (`tests/perf/random_layers.py`,
seed 11, bfloat16, channels last), with all tiles and splits. On the other half, the choice was 5 %
slower than the best on average. The same constants rank configurations on other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import (
    CLUSTERS,
    STEP_BYTES,
    Config,
    Gemm,
    tiles_of,
)
from convgrad_service.backends.cuda.tuning.correction import fastest
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["candidate_configs", "choose_config", "expected_s", "lines"]

# Clusters of 4 and 8 leave some SMs idle; the constants include that.
MULTIPROCESSORS, OF_LARGE_CLUSTERS = 132, 120
# The most clusters per tile that reduce through a workspace, relative to the SMs.
MOST_WAVES, WORKSPACES = 4, (2, 4, 8, 16, 32, 64)
# The fraction of the shorter of memory and compute time that is not overlapped.
NOT_OVERLAPPED = 0.25
UNIT_ACCUMULATORS, UNIT_WARPS = 64 * 64, 4
# Factors on a k-tile's time by the bytes of a copy, and on that of irregular k-tiles on an SM that
# computes several times as many blocks as are resident: from 30 large layers with other channels.
COPIES = {16: 1.0, 8: 2.0, 4: 2.5}
CROWDED, CROWDED_WAVES = 0.8, 8


@dataclass(frozen=True, slots=True)
class Rates:
    """Constants of the model, in microseconds.

    Sizes are in units of a 64 x 64 tile, or of 4 warps.

    Attributes
    ----------
    start
        A launch.
    block, block_size, block_irregular
        A block outside its mainloop: fixed, per size, and to locate irregular positions.
    step, step_size
        Latency of a k-tile.
    size, warps, block_issue
        Inverse throughput of k-tiles (by size and by warps), and of blocks, on an SM with several.
    irregular
        Factor on address computation if positions are irregular.
    cluster_reduce, cluster_reduce_size
        Reduction within a cluster.
    workspace_reduce, workspace_write
        Reduction through a workspace: fixed, and per megabyte that an SM writes.
    memory, l2
        Bandwidths in megabytes per microsecond.
    """

    start: float
    block: float
    block_size: float
    block_irregular: float
    step: float
    step_size: float
    size: float
    warps: float
    block_issue: float
    irregular: float
    cluster_reduce: float
    cluster_reduce_size: float
    workspace_reduce: float
    workspace_write: float
    memory: float
    l2: float


GATHER = Rates(
    start=4.45,
    block=0.92,
    block_size=0.98,
    block_irregular=1.45,
    step=0.077,
    step_size=0.374,
    size=0.191,
    warps=0.025,
    block_issue=0.81,
    irregular=2.66,
    cluster_reduce=0.175,
    cluster_reduce_size=0.112,
    workspace_reduce=0.84,
    workspace_write=2.35,
    memory=1.71,
    l2=11.5,
)
WGRAD = Rates(
    start=2.94,
    block=2.34,
    block_size=0.447,
    block_irregular=0.143,
    step=0.076,
    step_size=0.475,
    size=0.129,
    warps=0.042,
    block_issue=0.71,
    irregular=3.63,
    cluster_reduce=0.204,
    cluster_reduce_size=0.231,
    workspace_reduce=1.78,
    workspace_write=4.43,
    memory=6.56,
    l2=12.6,
)


def expected_s(gemm: Gemm, dtype: DType, config: Config, device: CudaDevice) -> float:
    """Return the expected seconds of a launch in a CUDA graph.

    A k-tile has the same number of bytes, and takes the same time, in 16-bit types and in TF32.
    """
    rates, tile = WGRAD if gemm.weight else GATHER, config.tile
    size, warps = tile.m * tile.n / UNIT_ACCUMULATORS, tile.threads / 32 / UNIT_WARPS
    irregular = rates.irregular if gemm.irregular else 1.0
    steps = config.steps(gemm, dtype)
    blocks = gemm.tiles(tile) * gemm.groups * len(gemm.phases) * config.splits
    usable = OF_LARGE_CLUSTERS if config.cluster > 2 else MULTIPROCESSORS
    blocks_per_sm = ceil_div(blocks * MULTIPROCESSORS, usable * device.multiprocessors)
    resident = min(blocks_per_sm, tile.resident(device, config.cluster, steps))

    block_latency = rates.block + rates.block_size * size / warps
    block_latency += rates.block_irregular if gemm.irregular else 0.0
    copies = COPIES[gemm.copies.vector]
    block_latency += steps * (rates.step * irregular * copies + rates.step_size * size / warps)
    copied = (tile.m + tile.n) * STEP_BYTES * MULTIPROCESSORS / 1e6 / rates.l2
    work = max(rates.size * size + rates.warps * warps * irregular, copied) * copies
    if gemm.irregular:
        work *= 1 + CROWDED * min(1.0, blocks_per_sm / resident / CROWDED_WAVES)
    block_issue = rates.block_issue * (warps + size) / 2 + steps * work
    sm_time = max(
        block_latency * ceil_div(blocks_per_sm, resident),
        block_latency + (blocks_per_sm - 1) * block_issue,
    )
    memory = gemm.bytes / 1e6 / rates.memory

    total = rates.start + max(sm_time, memory) + NOT_OVERLAPPED * min(sm_time, memory)
    if config.cluster > 1:
        total += rates.cluster_reduce + rates.cluster_reduce_size * log2(config.cluster) * size
    if config.workspace > 1:
        tiles_each = ceil_div(ceil_div(blocks, config.workspace), device.multiprocessors)
        written_mb = config.workspace * tiles_each * tile.m * tile.n * 4 / 1e6
        total += rates.workspace_reduce + rates.workspace_write * written_mb
    return total * 1e-6


def candidate_configs(
    gemm: Gemm, dtype: DType, device: CudaDevice, counters: int
) -> Iterator[Config]:
    """Yield the configurations with at least one k-tile per block and enough ``counters``."""
    steps = gemm.steps(dtype)
    clusters = CLUSTERS if device.capability >= (9, 0) else CLUSTERS[:1]
    for tile in tiles_of(dtype, gemm.copies, weight=gemm.weight):
        tiles = gemm.tiles(tile) * gemm.groups * len(gemm.phases)
        fitting = [
            cluster
            for cluster in clusters
            if (cluster == 1 or cluster <= min(steps, tile.fragments))
            and tile.shared_bytes(cluster, tile.stages) <= device.shared_bytes_per_block
        ]
        if not fitting:
            continue
        yield from (Config(tile, cluster) for cluster in fitting)
        most = fitting[-1]
        for workspace in WORKSPACES:
            few = tiles * most * workspace <= MOST_WAVES * device.multiprocessors
            if few and most * workspace <= steps and tiles * most <= counters:
                yield Config(tile, most, workspace)


def choose_config(
    gemm: Gemm, dtype: DType, device: CudaDevice, counters: int
) -> tuple[float, Config]:
    """Return the configuration with the least expected time, and that in seconds.

    It depends on the problem and the device model only.
    """
    every = candidate_configs(gemm, dtype, device, counters)
    return fastest(
        f"implicit_gemm_{'weight' if gemm.weight else 'gather'}",
        ((expected_s(gemm, dtype, config, device), config) for config in every),
        lambda found: lines(gemm, dtype, device, found),
        device,
        corrected=dtype.itemsize == 2,
    )


def lines(
    gemm: Gemm, dtype: DType, device: CudaDevice, found: Sequence[tuple[float, Config]]
) -> NDArray[np.float64]:
    """Return the `features` of configurations with their expected seconds."""
    tiles = [config.tile for _, config in found]
    return features(
        expected_s=[time_s for time_s, _ in found],
        rows=gemm.rows * gemm.groups * len(gemm.phases),
        columns=gemm.columns,
        depth=gemm.steps(dtype) * STEP_BYTES // dtype.itemsize,
        m=[tile.m for tile in tiles],
        n=[tile.n for tile in tiles],
        k=STEP_BYTES // dtype.itemsize,
        inner=[config.cluster for _, config in found],
        outer=[config.workspace for _, config in found],
        workers=device.multiprocessors,
        moved=gemm.bytes,
        kind=gemm.irregular,
        order=[tile.stages for tile in tiles],
    )
