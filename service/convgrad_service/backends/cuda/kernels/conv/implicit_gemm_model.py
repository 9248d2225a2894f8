"""Cost model of implicit_gemm, which chooses its tile and splits.

The constants of 16-bit types were fitted on an H200 to half of 250 random layers
(`tests/perf/random_layers.py`, seed 11, bfloat16, channels last), with all tiles and splits. On the
other half, the choice was 5 % slower than the best on average. Those of float32 were fitted by
`tests/perf/fit_implicit.py`. The same constants rank configurations on other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_rates import Rates, rates_of
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import (
    CHUNK_BYTES,
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
# Of planes whose pixels are copied one by one as they are no whole chunks, that on throughput; with
# irregular k-tiles, the rates include both. Fitted to half of 160 times of 1x1 layers.
PIXELS = 1.25
CROWDED, CROWDED_WAVES = 0.8, 8


def expected_s(
    gemm: Gemm, dtype: DType, config: Config, device: CudaDevice, rates: Rates | None = None
) -> float:
    """Return the expected seconds of a launch in a CUDA graph, with ``rates`` or the shipped ones.

    A k-tile has the same number of bytes in all types.
    """
    rates, tile = rates or rates_of(gemm, dtype), config.tile
    size, warps = tile.m * tile.n / UNIT_ACCUMULATORS, tile.threads / 32 / UNIT_WARPS
    irregular = rates.irregular if gemm.irregular else 1.0
    steps = config.steps(gemm, dtype)
    # Phases of dgrad without taps only store zeros; in 16-bit types, the corrections know that.
    uneven = dtype.itemsize == 4 and gemm.deepest < len(gemm.phases)
    deepest = gemm.deepest / len(gemm.phases) if uneven else 1.0
    mean_steps = gemm.mean_steps(dtype) / config.splits if uneven else float(steps)
    blocks = gemm.tiles(tile) * gemm.groups * len(gemm.phases) * config.splits
    usable = OF_LARGE_CLUSTERS if config.cluster > 2 else MULTIPROCESSORS
    blocks_per_sm = ceil_div(blocks * MULTIPROCESSORS, usable * device.multiprocessors)
    resident = tile.resident(device, config.cluster, steps)
    waves = ceil_div(blocks_per_sm, resident)
    deep_waves = ceil(blocks_per_sm * deepest / resident)

    block_latency = rates.block + rates.block_size * size / warps
    block_latency += rates.block_irregular if gemm.irregular else 0.0
    copies = latency = COPIES[gemm.copies.vector]
    if gemm.copies.planes:
        single = gemm.copies.vector < CHUNK_BYTES and not gemm.irregular
        copies, latency = (PIXELS, latency) if single else (1.0, 1.0)
    step_latency = rates.step * irregular * latency + rates.step_size * size / warps
    copied = (tile.m + tile.n) * STEP_BYTES * MULTIPROCESSORS / 1e6 / rates.l2
    work = max(rates.size * size + rates.warps * warps * irregular, copied) * copies
    if gemm.irregular:
        crowded = blocks_per_sm / min(blocks_per_sm, resident) / CROWDED_WAVES
        work *= 1 + CROWDED * min(1.0, crowded)
    block_issue = rates.block_issue * (warps + size) / 2 + mean_steps * work
    first = block_latency + steps * step_latency
    sm_time = max(
        first * deep_waves,
        (block_latency + mean_steps * step_latency) * waves,
        first + (blocks_per_sm - 1) * block_issue,
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
