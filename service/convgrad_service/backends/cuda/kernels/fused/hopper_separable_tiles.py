"""Tile shapes of hopper_separable, and their cost model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convgrad_service.plans.base import round_up
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div, macros_of
from convgrad_service.plans.cuda.works import FusedWork

__all__ = ["TILES", "Schedule", "SeparableTile", "expected_s", "schedules"]

CLOCK = 1.6e9
ALIGNED = 1024
# Bandwidth of an H200's memory, and of its L2 cache for these kernels, in bytes per second.
MEMORY, L2_CACHE = 4.0e12, 5.2e12
MAKERS, LOADERS = 2, 1


@dataclass(frozen=True, slots=True)
class SeparableTile:
    """An instance.

    Attributes
    ----------
    row_bytes
        Bytes of a chunk of a pixel's channels.
    groups, parts
        Consumer warpgroups, and blocks of 64 outputs of each.
    width, height
        Extents of a tile.
    unit_width, unit_height
        Pixels of a lane.
    middles
        Pipeline stages of the intermediate.
    sharers
        Warpgroups that share the same outputs.
    """

    row_bytes: int
    groups: int
    parts: int
    stride: int
    width: int
    height: int
    unit_width: int
    unit_height: int
    middles: int = 3
    sharers: int = 1

    @property
    def chunk(self) -> int:
        return self.row_bytes // 2

    @property
    def outputs(self) -> int:
        return self.groups // self.sharers * self.parts * 64

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def columns(self) -> int:
        """N of a wgmma."""
        return round_up(self.pixels // self.sharers, 8)

    @property
    def box(self) -> tuple[int, int]:
        """Columns and rows of the input in a tile.

        With chunks of 32 channels, half-warps compute different units, and odd row lengths avoid
        bank conflicts between them.
        """
        width, height = ((own - 1) * self.stride + 3 for own in (self.width, self.height))
        return (width | 1 if self.row_bytes == 64 else width), height

    @property
    def units(self) -> int:
        """Number of warp-sized units of the intermediate."""
        strips = ceil_div(self.width, self.unit_width)
        return strips * (self.height // self.unit_height) * self.row_bytes // 128

    @property
    def threads(self) -> int:
        return 128 * (self.groups + MAKERS + LOADERS)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of consumer, compute and producer threads, in total at most those at launch."""
        start = 65536 // round_up(self.threads, 128) // 8 * 8
        loaders = 32
        consumers = max(round_up(self.parts * self.columns // 2 + 40, 8), start + 8)
        left = start * (self.threads // 128) - loaders - self.groups * consumers
        return consumers, min(left // MAKERS // 8 * 8, start - 8), loaders

    @property
    def box_bytes(self) -> int:
        """Bytes of a stage: a box, and the depthwise weights and biases of its channels."""
        width, height = self.box
        box = round_up(width * height * self.row_bytes, 128)
        return box + round_up(self.chunk * 20, 128)

    @property
    def weight_bytes(self) -> int:
        return self.outputs * self.row_bytes

    @property
    def defines(self) -> dict[str, object]:
        """Return the preprocessor macros of an instance."""
        consumers, makers, loaders = self.registers
        return {
            **macros_of(self, "row_bytes", "groups", "sharers", "parts", "columns", "stride"),
            "TILE_W": self.width,
            "TILE_H": self.height,
            "UNIT_W": self.unit_width,
            "UNIT_H": self.unit_height,
            "BOX_W": self.box[0],
            "MIDDLES": self.middles,
            "CONSUMERS": consumers,
            "MAKERS": makers,
            "LOADERS": loaders,
        }

    def shared_bytes(self, x_stages: int, w_stages: int) -> int:
        """Return the bytes of dynamic shared memory; see ``hopper_separable.cu``."""
        rows = self.pixels // self.sharers * (self.sharers - 1) + self.columns
        return (
            ALIGNED
            + w_stages * self.weight_bytes
            + self.middles * round_up(rows * self.row_bytes, ALIGNED)
            + self.groups * self.columns * 128
            + x_stages * self.box_bytes
            + 8 * (2 * self.middles + 2 * x_stages + 2 * w_stages)
        )


TILES = (
    # For few channels: half a warp takes 32 of them.
    SeparableTile(64, 2, 1, 1, 14, 14, 2, 7, sharers=2),
    SeparableTile(128, 2, 1, 1, 14, 7, 2, 7),
    SeparableTile(128, 2, 2, 1, 14, 7, 2, 7),
    SeparableTile(128, 2, 2, 1, 19, 5, 3, 5),
    SeparableTile(128, 2, 1, 2, 14, 7, 2, 7, middles=2),
    SeparableTile(128, 2, 2, 2, 7, 7, 2, 7),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A tile, and the stages of both pipelines."""

    tile: SeparableTile
    x_stages: int
    w_stages: int
    resident: bool
    shared_bytes: int


def schedules(
    work: FusedWork, device: CudaDevice, tiles: Iterable[SeparableTile] = TILES
) -> Iterator[Schedule]:
    """Yield the schedules that fit."""
    first = work.first
    for tile in tiles:
        if (tile.stride, tile.stride) != first.stride[1:]:
            continue
        if tile.row_bytes == 64 and first.groups > tile.chunk:
            continue
        made = _schedule(tile, work, device)
        if made is not None:
            yield made


def _schedule(tile: SeparableTile, work: FusedWork, device: CudaDevice) -> Schedule | None:
    """Return a schedule with resident weights if three boxes also fit, else with three stages."""
    room = device.shared_bytes_per_block
    chunks = ceil_div(work.first.groups, tile.chunk)
    slices = ceil_div(work.second.out_channels, tile.outputs)
    ways = [(3, False, 3), (2, False, 2)]
    if slices == 1:
        ways = [(chunks, True, 2 if chunks == 1 else 3), *ways]
    for w_stages, resident, least in ways:
        for x_stages in range(6, least - 1, -1):
            needed = tile.shared_bytes(x_stages, w_stages)
            if needed <= room:
                return Schedule(tile, x_stages, w_stages, resident, needed)
    return None


def expected_s(schedule: Schedule, work: FusedWork, device: CudaDevice) -> float:
    """Return the expected seconds of the busiest block, or of memory or L2 traffic if longer.

    Boxes overlap, and each slice of the outputs reads a tile's boxes again.
    """
    tile, first, second = schedule.tile, work.first, work.second
    chunks = ceil_div(first.groups, tile.chunk)
    slices = ceil_div(second.out_channels, tile.outputs)
    tiles = first.batch
    for extent, own in zip(first.output[1:], (tile.height, tile.width), strict=True):
        tiles *= ceil_div(extent, own)
    per_lane = tile.unit_width * tile.unit_height
    box_w, box_h = ((own - 1) * tile.stride + 3 for own in (tile.unit_width, tile.unit_height))
    made = tile.units * (3 * box_w * box_h + 20 * per_lane + 30) / 4 / 0.7
    multiplied = tile.outputs / 64 * tile.row_bytes / 32 * tile.columns / 2
    item = chunks * (max(made, multiplied) + 150) + 500 + 250 * tile.parts
    turns = ceil_div(tiles * slices, device.multiprocessors)
    read = first.batch * first.groups * first.input[1] * first.input[2]
    written = second.out_channels * first.pixels
    boxes = tile.box[0] * tile.box[1] * tile.row_bytes
    weights = 0 if schedule.resident else tile.weight_bytes
    loaded = tiles * slices * chunks * (boxes + weights)
    memory = max(2 * (read + written) / MEMORY, loaded / L2_CACHE)
    return max(turns * item / CLOCK, memory) + 5e-6
