"""Tiles of hopper_halo.cu, and their cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import gcd, prod
from typing import Any

from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    pixels_beside,
    stores_planes,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_halo_tables import (
    CHUNK,
    TAP_BYTES,
    Halo,
    Tables,
    halo_of,
    tables_of,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems.sizes import Size3

__all__ = ["COLUMNS", "GROUPS", "TABLE_BYTES", "HaloTile", "halo_tiles", "some_tile_fits"]

COLUMNS = (64, 144, 208, 240)
"""N of a wgmma, by instance, up to what a warpgroup's registers hold."""
GROUPS = 2
"""Consumer warpgroups."""
ROW_BYTES = 2 * CHUNK
# Positions per vector store, and bytes of the staging buffers of all warps, with alignment.
GROUP, STAGING_BYTES = 8, 8 * 16 * (64 * 2 + 16) + 16
MOST_BOX = 256
LEAST_WIDTH = 7
LEAST_STAGES, MOST_STAGES = 2, 16
SLOTS = (6, 4, 3, 2)
ALIGNMENT = 1024
TABLES = {"steps": 64, "taps": 128}
MOST_SLICES = 16
TABLE_BYTES = 1216
"""The capacity of the tables in the kernel parameters."""
# Cost model, in clocks of an H200: overhead of a tile, of streaming weights through it, and of
# a launch; and the bytes that an SM loads per clock.
TILE_CLOCKS, STREAM_CLOCKS, LAUNCH_CLOCKS, BYTES_A_CLOCK = 1500, 1200, 6000, 22


@dataclass(frozen=True, slots=True)
class Problem:
    """A convolution to be tiled.

    Attributes
    ----------
    channels
        Channels of the source and of the result.
    staged
        Whether results are staged in shared memory, so that adjacent ones are stored together.
    """

    channels: tuple[int, int]
    batch: int
    axes: tuple[Axis, ...]
    staged: bool = False

    @property
    def extents(self) -> Size3:
        """Positions of the result along D, H and W."""
        d, h, w = (axis.phases[0].count for axis in self.axes)
        return d, h, w

    @property
    def twice(self) -> bool:
        """Whether a product has the results of two depths, as channels fill only half of its M."""
        few = self.channels[1] <= CHUNK and self.extents[0] > 1
        return few and abs(self.axes[0].x_tap) == 1


@dataclass(frozen=True, slots=True)
class HaloTile:
    """A tile.

    Attributes
    ----------
    columns
        N of a wgmma; the two consumer warpgroups have half of a tile's each.
    extent
        Positions of the tile along D, H and W.
    stages, slots
        Pipeline stages of the source, and of the weights; 0 slots if all weights are resident.
    """

    problem: Problem
    halo: Halo
    tables: Tables
    columns: int
    extent: Size3
    stages: int
    slots: int

    @property
    def name(self) -> str:
        d, h, w = self.extent
        return f"{d}x{h}x{w}_columns{self.columns}{'_stay' if self.slots == 0 else ''}"

    @property
    def twice(self) -> bool:
        return self.problem.twice

    @property
    def staged(self) -> bool:
        return self.problem.staged

    @property
    def tiles(self) -> Size3:
        d, h, w = (
            ceil_div(whole, part)
            for whole, part in zip(self.problem.extents, self.extent, strict=True)
        )
        return d, h, w

    @property
    def channel_tiles(self) -> int:
        return ceil_div(self.problem.channels[1], 64)

    @property
    def count(self) -> int:
        return self.problem.batch * prod(self.tiles) * self.channel_tiles

    @property
    def row_pixels(self) -> int:
        return self.extent[2] + self.halo.beyond[1]

    @property
    def rows(self) -> int:
        return self.extent[1] + self.halo.beyond[0]

    @property
    def box_bytes(self) -> int:
        return self.row_pixels * self.rows * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        return ceil_div(self.box_bytes, ALIGNMENT) * ALIGNMENT

    @property
    def chunks(self) -> int:
        return ceil_div(self.problem.channels[0], CHUNK)

    @property
    def load_bytes(self) -> int:
        return self.tables.run * TAP_BYTES

    @property
    def weight_bytes(self) -> int:
        return (self.slots or self.chunks) * self.tables.slot_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: tables, alignment, the pipelines, barriers and staging.

        wgmma reads past the end of a slice, and this must be allocated too.
        """
        barriers = 16 * (self.stages + (self.slots or self.chunks))
        last = max(tap.pixel for tap in self.tables.taps) + self.columns * GROUPS
        past = last * ROW_BYTES - self.stage_bytes
        staging = STAGING_BYTES if self.staged else 0
        return (
            TABLE_BYTES
            + ALIGNMENT
            + self.stages * self.stage_bytes
            + max(self.weight_bytes + barriers + staging, past)
        )

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory: ``shared_bytes`` without the tables, which are static."""
        return self.shared_bytes - TABLE_BYTES

    def clocks(self, device: CudaDevice) -> float:
        """Return the expected clocks of a launch."""
        depths = 2 * self.chunks
        products = len(self.tables.taps) * depths * self.columns / 2 * GROUPS
        moved = self.chunks * len(self.halo.depths) * self.box_bytes
        if self.slots:
            moved += self.chunks * len(self.tables.steps) * self.load_bytes
        tile = max(products, moved / BYTES_A_CLOCK) + TILE_CLOCKS
        if self.slots:
            tile += STREAM_CLOCKS
        # With resident weights, the first product waits for a whole chunk of them.
        first = self.tables.slot_bytes / BYTES_A_CLOCK
        return ceil_div(self.count, device.multiprocessors) * tile + first + LAUNCH_CLOCKS

    def describe(self, args: Any) -> None:
        """Fill in the kernel parameters that depend on the tile."""
        tables, halo = self.tables, self.halo
        args.tile[:], args.tiles[:] = self.extent, self.tiles
        args.channel_tiles, args.all_tiles = self.channel_tiles, self.count
        args.size[:], args.first[:] = self.problem.extents, halo.first
        args.row_pixels = self.row_pixels
        args.row_factor = ceil_div(2**20, self.row_pixels)
        args.chunks, args.slices, args.steps = self.chunks, len(halo.depths), len(tables.steps)
        args.stages, args.stage_bytes, args.box_bytes = (
            self.stages,
            self.stage_bytes,
            self.box_bytes,
        )
        args.slots, args.slot_bytes = self.slots, tables.slot_bytes
        args.load_bytes = self.load_bytes
        args.chunk_bytes = tables.slot_bytes
        args.shared_weights = self.stages * self.stage_bytes
        args.row_channels = CHUNK if self.twice else 64
        args.deeper_first = self.problem.axes[0].x_tap > 0
        args.tables.depth[: len(halo.depths)] = halo.depths
        for index, step in enumerate(tables.steps):
            for name in ("taps", "last", "first_tap"):
                setattr(args.tables.step[index], name, int(getattr(step, name)))
        for index, tap in enumerate(tables.taps):
            args.tables.tap[index].pixel = tap.pixel * ROW_BYTES // 16
            args.tables.tap[index].weight = tap.weight // 16
        for index, load in enumerate(tables.loads):
            into = args.tables.load[index]
            into.to = load.to // 16
            into.t, into.r, into.s = load.tap


def some_tile_fits(work: ConvWork, axes: Sequence[Axis], device: CudaDevice) -> bool:
    """Return whether any tile fits, regardless of the number of positions.

    Tries two adjacent depths of a single row of the smallest width.
    """
    extents = 2, 1, 2 * LEAST_WIDTH - 1
    few = [
        replace(axis, phases=tuple(replace(phase, count=count) for phase in axis.phases))
        for axis, count in zip(axes, extents, strict=True)
    ]
    return bool(halo_tiles(work, few, device))


def halo_tiles(work: ConvWork, axes: Sequence[Axis], device: CudaDevice) -> tuple[HaloTile, ...]:
    """Return the tiles that fit, fastest first."""
    chunks = stores_planes(work) and pixels_beside(work) == GROUP == gcd(
        axes[2].phases[0].count, GROUP
    )
    return _tiles(Problem(work.channels, work.batch, tuple(axes), chunks), device)


@lru_cache(maxsize=256)
def _tiles(problem: Problem, device: CudaDevice) -> tuple[HaloTile, ...]:
    halo = halo_of(problem.axes, twice=problem.twice)
    if len(halo.depths) > MOST_SLICES:
        return ()
    found: list[HaloTile] = []

    @cache
    def tables_for(width: int, stay: bool) -> Tables | None:
        """Return the tables, which many tiles share; None if there are too many."""
        tables = tables_of(
            problem.axes,
            halo,
            width + halo.beyond[1],
            twice=problem.twice,
            stay=stay,
        )
        fits = all(len(getattr(tables, name)) <= most for name, most in TABLES.items())
        return tables if fits else None

    for width, rows, columns in _shapes(problem, halo):
        extent = 2 if problem.twice else 1, rows, width
        for stay in (True, False):
            tables = tables_for(width, stay)
            if tables is None:
                continue
            tile = _fitted(problem, device, halo, tables, columns, extent, stay=stay)
            if tile is not None:
                found.append(tile)
    return tuple(sorted(found, key=lambda tile: tile.clocks(device)))


def _shapes(problem: Problem, halo: Halo) -> Iterator[tuple[int, int, int]]:
    """Yield widths and rows of tiles, and the fewest columns per product that cover them."""
    extents = problem.extents
    for parts in range(1, extents[2] + 1):
        width = ceil_div(extents[2], parts)
        if parts > 1 and width == ceil_div(extents[2], parts - 1):
            continue
        if parts > 1 and width < LEAST_WIDTH:
            return
        pixels = width + halo.beyond[1]
        if pixels > MOST_BOX:
            continue
        for rows in range(1, min(extents[1], MOST_BOX - halo.beyond[0]) + 1):
            needed = (rows - 1) * pixels + width
            columns = next((n for n in COLUMNS if n * GROUPS >= needed), None)
            if columns is None:
                break
            yield width, rows, columns


def _fitted(
    problem: Problem,
    device: CudaDevice,
    halo: Halo,
    tables: Tables,
    columns: int,
    extent: Size3,
    *,
    stay: bool,
) -> HaloTile | None:
    """Return the tile with as many slots and stages as fit, or None if too few do."""
    for slots in (0,) if stay else SLOTS:
        tile = HaloTile(problem, halo, tables, columns, extent, LEAST_STAGES, slots)
        if stay and tile.channel_tiles > 1:
            return None
        room = device.shared_bytes_per_block - tile.shared_bytes
        if room >= 0:
            more = room // (tile.stage_bytes + 16)
            return replace(tile, stages=min(LEAST_STAGES + more, MOST_STAGES))
    return None
