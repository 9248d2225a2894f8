"""Depthwise 3x3 and pointwise convolution fused into one kernel on Hopper (hopper_separable.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import IN_16_BITS
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import in_whole_chunks
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.base import round_up
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import ConvWork, FusedWork, Operand

__all__ = ["MAKERS", "TILES", "HopperSeparable", "Schedule", "SeparableTile", "expected_s"]


CLOCK = 1.6e9
ALIGNED = 1024
# Bandwidth of an H200's memory, and of its L2 cache for these kernels, in bytes per second.
MEMORY, L2_CACHE = 4.0e12, 5.2e12
MAKERS, LOADERS = 2, 1
MAX_ITEMS, MAX_EXTENT = 2**31 - 2**16, 2**28
# Measured on an H200: from 512 to 512 channels at 14 x 14, the fused launch takes as long as two
# launches with 64 images, and a third longer with one to eight. With 728 or 1024, it takes longer.
MOST_OUTPUTS = 256


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


HopperSeparableArgs = structure("fused/hopper_separable_args.cuh", "HopperSeparableArgs")


class HopperSeparable(Solver[FusedWork, Schedule]):
    """fwd of a depthwise 3x3 and a pointwise convolution in 16-bit types, channels last."""

    name = "hopper_separable"

    def __init__(self, tiles: Iterable[SeparableTile] = TILES, *, anything: bool = False) -> None:
        """Create the family.

        Parameters
        ----------
        tiles
            The tile shapes to choose from.
        anything
            Take all work that the kernel can compute, even if two launches are faster.
        """
        self._tiles, self._anything = tuple(tiles), anything

    def solve(self, work: FusedWork, device: CudaDevice) -> Schedule | str:
        """See `Solver.solve`. Except for sizes that overflow, splitting the problem does not change
        whether there is a schedule."""
        first, second = work.first, work.second
        if device.architecture not in HOPPER:
            return f"{device.name} has no wgmma"
        if first.dtype not in IN_16_BITS:
            return f"{first.dtype} is not a 16-bit type"
        if not is_pointwise(second):
            return "the second convolution is not 1x1 of one group"
        if first.in_channels != 1 or first.out_channels != 1:
            return "the first convolution is not depthwise"
        if first.kernel != (1, 3, 3) or first.dilation[1:] != (1, 1):
            return f"a kernel of {first.kernel} with dilation {first.dilation}: 3x3 alone"
        if first.stride[1:] not in ((1, 1), (2, 2)) or first.input[0] * first.output[0] > 1:
            return f"a stride of {first.stride}, or more than one plane"
        if not self._anything and second.out_channels > MOST_OUTPUTS:
            return (
                f"{second.out_channels} outputs: the intermediate would be recomputed for every "
                f"{MOST_OUTPUTS} of them, which takes longer than writing and reading it"
            )
        if not lies_well(first, second):
            return "the channels are not contiguous"
        y_extents = (second.batch, 1, second.out_channels, *second.output)
        if not in_whole_chunks(second.y, y_extents, 2):
            return "the result's channels are not contiguous whole 16-byte chunks"
        if max(*first.input, *first.output, *first.pad, first.batch) > MAX_EXTENT:
            return f"positions reach beyond {MAX_EXTENT}"
        if first.pixels > MAX_ITEMS // ceil_div(second.out_channels, 64):
            return "too many tiles to number"
        every = schedules(work, device, self._tiles)
        best = min(every, key=lambda one: expected_s(one, work, device), default=None)
        return best or "a tile and the depthwise weights do not fit into shared memory"

    def fragment(self, work: FusedWork, device: CudaDevice, schedule: Schedule) -> Fragment:
        first, second = work.first, work.second
        tile = schedule.tile
        args = HopperSeparableArgs()
        args.channels, args.outputs = first.groups, second.out_channels
        args.chunks = ceil_div(first.groups, tile.chunk)
        args.slices = ceil_div(second.out_channels, tile.outputs)
        args.tiles_across = ceil_div(first.output[2], tile.width)
        args.tiles_down = ceil_div(first.output[1], tile.height)
        tiles = args.tiles_across * args.tiles_down * first.batch
        args.items = tiles * args.slices
        args.x_stages, args.w_stages = schedule.x_stages, schedule.w_stages
        args.resident = schedule.resident
        args.activation0 = ACTIVATIONS[first.activation]
        args.activation1 = ACTIVATIONS[second.activation]
        args.pad[:] = first.pad[1:]
        args.by_slices = divider(args.slices)
        args.by_across, args.by_down = divider(args.tiles_across), divider(args.tiles_down)
        maps = {
            "x_map": (first.x, _boxes(first, tile)),
            "w1_map": (second.w, _rows(second.w, first.groups, second.out_channels, tile)),
            "y_map": (second.y, _results(second, tile)),
        }
        launch = Launch(
            _instance(tile, first.dtype),
            (min(args.items, device.multiprocessors), 1, 1),
            (tile.threads, 1, 1),
            pack_maps(args, maps, w0=first.w, bias0=first.bias, bias1=second.bias),
            schedule.shared_bytes,
        )
        name = f"{self.name}_{tile.height}x{tile.width}_{tile.outputs}"
        return Fragment(name, (launch,), expected_s=expected_s(schedule, work, device))

    def instances(self) -> Iterable[Instance]:
        return [_instance(tile, dtype) for tile in self._tiles for dtype in IN_16_BITS]


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


def _results(second: ConvWork, tile: SeparableTile) -> TiledMap:
    """Return the tensor map of the result, whose box is 64 outputs of a group's pixels."""
    box = (64, tile.width, tile.height // tile.sharers, 1)
    return TiledMap.of_images(
        second.y, second.out_channels, second.output[1:], second.batch, box, swizzle=128
    )


def _rows(operand: Operand, channels: int, outputs: int, tile: SeparableTile) -> TiledMap:
    """Return the tensor map of the pointwise weights, whose box is a chunk of a block's outputs."""
    return TiledMap(
        operand.dtype,
        (channels, outputs),
        (max(operand.strides[1] * operand.dtype.itemsize, 16),),
        swizzle=tile.row_bytes,
        box=(tile.chunk, tile.outputs),
    )


def _boxes(first: ConvWork, tile: SeparableTile) -> TiledMap:
    """Return the tensor map of the input, whose box is a tile's pixels with their halo."""
    box = (tile.chunk, *tile.box, 1)
    return TiledMap.of_images(first.x, first.groups, first.input[1:], first.batch, box)


def _instance(tile: SeparableTile, dtype: DType) -> Instance:
    return Instance.of("fused/hopper_separable.cu", HOPPER, ELEMENT=dtype, **tile.defines)


def is_pointwise(work: ConvWork) -> bool:
    """Return whether a work is a 1x1 convolution with stride 1 and one group."""
    return (
        work.groups == 1
        and work.taps == 1
        and work.stride == (1, 1, 1)
        and not any(work.pad)
        and work.input == work.output
    )


def lies_well(first: ConvWork, second: ConvWork) -> bool:
    """Return whether channels are contiguous, those of inputs in whole chunks, and the depthwise
    taps of each channel are contiguous."""
    x_extents = (first.batch, first.groups, 1, *first.input)
    w1_extents = (1, second.out_channels, second.in_channels, 1, 1, 1)
    taps = (prod(first.kernel), 0, 0, first.kernel[1] * first.kernel[2], first.kernel[2], 1)
    extents = (first.groups, 1, 1, *first.kernel)
    return (
        in_whole_chunks(first.x, x_extents, 1)
        and in_whole_chunks(second.w, w1_extents, 2)
        and second.y.strides[2] == 1
        and all(
            given == wanted
            for given, wanted, extent in zip(first.w.strides, taps, extents, strict=True)
            if extent > 1
        )
    )
