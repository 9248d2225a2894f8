"""Partitions of a gather with few channels of the result (few_results.cu), and their times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, gather_axis
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DEPTH", "STRIP", "TILES", "Cut", "Gather", "Tile", "cuts_of", "expected_s"]

DEPTH, STRIP = 8, 4
"""Channels of the source of a stage, and adjacent groups of a thread."""
THREADS, BLOCKS = 256, 2
"""The most threads of a block, and blocks of an SM."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A thread's columns (positions of a group x channels), and rows."""

    columns: int
    rows: int

    @property
    def sums(self) -> int:
        return self.columns * self.rows * STRIP


TILES = tuple(
    Tile(columns, rows)
    for columns, most in ((1, 4), (2, 4), (3, 4), (4, 3), (6, 2), (8, 1), (12, 1))
    for rows in dict.fromkeys((1, most))
)


@dataclass(frozen=True)
class Gather:
    """A work in the terms of `few_results.cu`: groups and steps along W, phases along D and H."""

    work: ConvWork

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        return gather_axis(self.work, 0), gather_axis(self.work, 1)

    @property
    def backward(self) -> bool:
        return self.work.direction == "bwd_data"

    @cached_property
    def group(self) -> int:
        return self.work.stride[2] if self.backward else 1

    @cached_property
    def steps(self) -> int:
        return ceil_div(self.work.kernel[2], self.group)

    @cached_property
    def ahead(self) -> int:
        """Groups of nothing but padding before the first one."""
        return self.work.pad[2] // self.group if self.backward else 0

    @cached_property
    def first(self) -> int:
        """The first position of the source that a group reads, relative to its number."""
        return self.ahead - self.steps + 1 if self.backward else -self.work.pad[2]

    @cached_property
    def shift(self) -> int:
        """The first position of the result in group 0, at most 0."""
        return self.ahead * self.group - self.work.pad[2] if self.backward else 0

    @cached_property
    def groups(self) -> int:
        return ceil_div(self.work.sizes[1][2] - self.shift, self.group)

    @cached_property
    def first_columns(self) -> int:
        """The columns (positions of a group x channels) that the first step has taps for."""
        positions = self.work.kernel[2] - (self.steps - 1) * self.group
        return (positions if self.backward else 1) * self.work.channels[1]

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The most positions of a phase along D and H."""
        depth, height = (max(one.count for one in axis.phases) for axis in self.axes)
        return depth, height

    @cached_property
    def taps(self) -> tuple[int, int]:
        """The most taps of a phase along D and H."""
        depth, height = (max(1, *(one.taps for one in axis.phases)) for axis in self.axes)
        return depth, height

    @cached_property
    def rows(self) -> tuple[int, int]:
        """The first row that a tile at row 0 reads, and the first one behind those of a position of
        every phase."""
        axis = self.axes[1]
        ends = [
            (one.x0, one.x0 + (one.taps - 1) * axis.x_tap) for one in axis.phases if one.taps > 0
        ]
        if not ends:
            return 0, 0
        return min(map(min, ends)), max(map(max, ends)) + 1


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition: a block's roles, shares of the channels, and a role's strips in three
    dimensions, of which `threads` are a share's."""

    tile: Tile
    roles: int
    shares: int
    planes: int
    rows: int
    strips: int

    @property
    def of_role(self) -> int:
        return self.planes * self.rows * self.strips

    @property
    def threads(self) -> int:
        return ceil_div(self.of_role, 32) * 32 * self.shares * self.roles

    def column_blocks(self, of: Gather) -> int:
        return ceil_div(of.group * of.work.channels[1], self.tile.columns)

    def all_roles(self, of: Gather) -> int:
        return len(of.axes[1].phases) * self.column_blocks(of)

    def tiles(self, of: Gather) -> tuple[int, int, int]:
        """Return the tiles along D, H and W."""
        return (
            ceil_div(of.counts[0], self.planes),
            ceil_div(of.counts[1], self.rows * self.tile.rows),
            ceil_div(of.groups, self.strips * STRIP),
        )

    def blocks(self, of: Gather) -> int:
        roles = ceil_div(self.all_roles(of), self.roles)
        return roles * prod(self.tiles(of)) * len(of.axes[0].phases) * of.work.batch

    def columns(self, of: Gather) -> int:
        """Return the columns of the source in a stage, whole fours."""
        return STRIP * (self.strips + ceil_div(of.steps - 1, STRIP))

    def source_rows(self, of: Gather) -> int:
        first, end = of.rows
        return end - first + (self.rows * self.tile.rows - 1) * of.axes[1].x_step

    def source_planes(self, of: Gather) -> int:
        axis = of.axes[0]
        return (self.planes - 1) * axis.x_step + (of.taps[0] - 1) * abs(axis.x_tap) + 1

    def row_pitch(self, of: Gather) -> int:
        """Return the elements between rows: if little room suffices, such that what threads of
        several rows load follows one another in banks."""
        least = self.columns(of) // STRIP
        step = self.tile.rows * of.axes[1].x_step
        fours = range(least, least + (self.strips < 8) * least // 4 + 1)
        return STRIP * next((n for n in fours if (step * n - self.strips) % 8 == 0), least)

    def channel_pitch(self, of: Gather) -> int:
        size = self.source_planes(of) * self.source_rows(of) * self.row_pitch(of)
        # Lanes that copy eight channels of four positions write to different banks.
        return size + (STRIP - size) % 32 if of.work.sides[0].channels_last else size

    def tap_pitch(self, of: Gather) -> int:
        return ceil_div(of.steps * self.tile.columns, 4) * 4

    def weights(self, of: Gather) -> int:
        """Return the elements of a channel's weights."""
        return self.roles * prod(of.taps) * self.tap_pitch(of)

    def stage(self, of: Gather) -> int:
        return DEPTH * (self.channel_pitch(of) + self.weights(of))

    def shared_bytes(self, of: Gather) -> int:
        sums = self.tile.sums * (self.roles * self.of_role + 1)
        tables = self.weights(of) + self.channel_pitch(of)
        # Threads load weights of rows of taps behind the last one.
        beyond = self.tile.rows * self.tap_pitch(of)
        return 4 * max(tables + 2 * self.stage(of) + beyond, sums)


def even(count: int, most: int) -> list[int]:
    """Return the sizes, at most ``most``, of that or up to 8 times as many even parts."""
    least = ceil_div(count, most)
    return list(dict.fromkeys(ceil_div(count, parts * least) for parts in (1, 2, 3, 4, 6, 8)))


def cuts_of(of: Gather, device: CudaDevice) -> Iterator[Cut]:
    """Return the partitions that fit, for the columns with the least padding."""
    work, height = of.work, of.axes[1]
    columns = of.group * work.channels[1]
    widths = sorted({tile.columns for tile in TILES}, reverse=True)
    width = min(widths, key=lambda one: ceil_div(columns, one) * (one + 1))
    adjacent = height.x_step == abs(height.x_tap)
    for tile in TILES:
        if tile.columns != width or (tile.rows > 1 and not adjacent):
            continue
        all_roles = len(height.phases) * ceil_div(columns, width)
        roles = {ceil_div(all_roles, ceil_div(all_roles, most)) for most in (1, 2, 4, 8)}
        for own, shares in product(sorted(roles), (1, 2, 4, 8)):
            room = THREADS // (own * shares) // 32 * 32
            for strips, planes in product(even(ceil_div(of.groups, STRIP), 32), (1, 2, 4)):
                if planes > of.counts[0] or strips * planes > room:
                    continue
                rows = even(ceil_div(of.counts[1], tile.rows), room // (strips * planes))[0]
                cut = Cut(tile, own, shares, planes, rows, strips)
                if cut.shared_bytes(of) <= device.shared_bytes_per_block:
                    yield cut


# Of an SM, per clock: instructions, accesses to shared memory; bytes of the cache and of memory.
ISSUED, ACCESSES, CACHED, BYTES = 3.0, 0.8, 20.0, 16.0
START_S, CLOCKS_PER_S = 4e-6, 1.7e9
# Clocks of a stage in which a block waits, and of a block.
STAGE, BLOCK = 700.0, 3000.0
# Instructions that a warp issues per clock.
WARP = 0.5
SECTOR_BYTES = 32


def expected_s(of: Gather, device: CudaDevice, cut: Cut) -> float:
    """Return the seconds that the launch should take."""
    work, tile, (depth, height) = of.work, cut.tile, of.axes
    read = work.channels[0]
    stages = ceil_div(read, DEPTH)
    # Of all phases along D and H and all columns, per channel of the source: rows of the source
    # that a thread loads, and taps of its rows of the result.
    meets = [one.taps for one in height.phases if one.taps > 0]
    every = sum(one.taps for one in depth.phases) * cut.column_blocks(of)
    rows = sum(taps + tile.rows - 1 for taps in meets) * every
    taps = sum(meets) * tile.rows * every
    weights, fours = ceil_div(of.steps * tile.columns, 4), 1 + ceil_div(of.steps - 1, 4)
    warps = float(ceil_div(cut.of_role, 32))
    copies = len(depth.phases) * ceil_div(cut.all_roles(of), cut.roles)
    source_rows = cut.source_planes(of) * cut.source_rows(of) * copies
    copied, laid = source_rows * cut.columns(of) / 32, cut.weights(of) / 32 * copies
    half = ceil_div(tile.columns, 2)
    blocks = range(cut.column_blocks(of))
    skipped = sum(of.first_columns - block * tile.columns <= half for block in blocks)
    added = of.steps * tile.columns - (tile.columns - half) * skipped / len(blocks)
    issued = warps * (taps * (STRIP * added + weights + 6) + rows * (fours + 8))
    accesses = warps * (taps * weights + rows * 4 * fours)
    issued += copied * 5 + laid * 12
    accesses += copied * 2 + laid * 2
    stored = tile.sums * cut.of_role * cut.roles / 32 * copies
    clocks = read * max(issued / ISSUED, accesses / ACCESSES) + stored * 45 / ISSUED
    # Of one of a tile's blocks.
    own = clocks / copies
    alone = own * max(1.0, ISSUED / (WARP * cut.threads / 32)) + BLOCK + stages * STAGE
    together = max(
        1, min(device.fitting_blocks(cut.shared_bytes(of)), BLOCKS * THREADS // cut.threads)
    )
    turns = ceil_div(cut.blocks(of), device.multiprocessors)
    clocks = max(turns * own, ceil_div(turns, together) * alone)
    item, last = work.dtype.itemsize, work.sides[0].channels_last
    row_bytes = cut.columns(of) * item * DEPTH
    if not last:
        row_bytes = (ceil_div(cut.columns(of) * item, SECTOR_BYTES) + 1) * SECTOR_BYTES * DEPTH
    cached = prod(cut.tiles(of)) * work.batch * source_rows * row_bytes * stages
    moved = max(cached / CACHED, work.elements * item / BYTES) / device.multiprocessors
    return START_S + max(clocks, moved) / CLOCKS_PER_S
