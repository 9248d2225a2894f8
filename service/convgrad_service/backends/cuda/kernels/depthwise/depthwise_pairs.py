"""Depthwise fprop and dgrad on tensor cores, without transposing pixels (depthwise_pairs.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    IN_16_BITS,
    STRIP_COLUMNS,
    LinearCost,
    Plane,
    plane_of,
    resident_blocks,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["PAIR_TILES", "DepthwisePairs", "DepthwisePairsArgs", "PairTile", "place_bytes"]

COST = LinearCost(4.5, 0.264, 0.0101, 0.641)
TILE_STRIPS = 8
# Rows in shared memory.
STAGES = 4
# Fixed cost of a part of a share, in rows, and the fraction of an SM that a single block uses;
# fitted to sweeps on an H200.
START_ROWS = 3
ALONE = 0.65
# For 3x3 kernels with stride 1: the least fraction of strip columns that are not padding, and the
# elements of the result below which other families are faster.
FULL = 0.85
FEW = 2**19
# The most divisions of an image's rows to try, besides equal shares.
MOST_PARTS = 16


@dataclass(frozen=True, slots=True)
class PairTile:
    """A tile shape.

    Attributes
    ----------
    kernel_rows
        The most kernel rows.
    units
        Units of 4 columns of x per product.
    octets, pairs
        Channels of a block in units of 8, and of a warp in units of 2.
    blocks
        Blocks per SM.
    cost
        Cost of a row of an octet, relative to other tiles for the same kernel.
    """

    kernel_rows: int
    stride: int
    units: int
    octets: int = 4
    pairs: int = 4
    blocks: int = 3
    cost: float = 1.0

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.octets * 8

    @property
    def threads(self) -> int:
        return self.octets * 128 // self.pairs

    @property
    def more(self) -> int:
        """Units of a strip's columns that it reads after its own."""
        blocks = self.units + 1 if self.stride == 1 else 2 * self.units
        return ((blocks - 1) * 4 // self.stride + 3) * self.stride // STRIP_COLUMNS


# Of the tiles that fit a kernel, the one with the least predicted time is used.
PAIR_TILES = (
    PairTile(3, 1, 2, 4, blocks=4),
    PairTile(3, 1, 2, 6, blocks=2),
    PairTile(5, 1, 2, 4, blocks=3),
    PairTile(5, 1, 2, 6, blocks=2),
    PairTile(7, 1, 3, 4, blocks=2),
    # Blocks of half the size, for few pixels.
    PairTile(7, 1, 3, 2, pairs=2, blocks=4, cost=1.15),
    PairTile(9, 1, 3, 2, pairs=1, blocks=2),
    PairTile(13, 1, 4, 2, pairs=1, blocks=1),
    PairTile(5, 2, 1, 6, blocks=2),
)


DepthwisePairsArgs = structure("depthwise/depthwise_pairs.cuh", "DepthwisePairsArgs")


class DepthwisePairs(Solver[ConvWork, tuple[Plane, PairTile]]):
    """bwd_data, and fwd with stride 1, in 16-bit types with one channel per group, channels
    last."""

    name = "depthwise_pairs"

    def __init__(self, tiles: tuple[PairTile, ...] = PAIR_TILES, anything: bool = False) -> None:
        """Create the family; with ``anything``, it also takes work at which others are faster."""
        self._tiles, self._anything = tiles, anything

    def solve(self, work: ConvWork, device: CudaDevice) -> tuple[Plane, PairTile] | str:
        if work.out_channels > 1:
            return f"{work.out_channels} channels per group"
        if work.accumulate is not None:
            return "a tensor to accumulate"
        if work.leads:
            return "the next launch would overlap it, which was not measured"
        plane = plane_of(work)
        if isinstance(plane, str):
            return plane
        if work.groups * work.taps >= 2**31:
            return "a weight of more than 2^31 elements"
        tile = self._tile(work, plane, device)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if not self._anything and (reason := _why_not_full(work, plane)) is not None:
            return reason
        rows = min(one.kernel_rows for one in self._tiles if one.kernel_rows >= plane.reach[0])
        if tile.kernel_rows > rows and not self._anything:
            return f"{plane.reach[1]} columns take an instance of {tile.kernel_rows} rows"
        return plane, tile

    def fragment(
        self, work: ConvWork, device: CudaDevice, config: tuple[Plane, PairTile]
    ) -> Fragment:
        launch, expected = _launch(work, device, *config), COST.expected_s(work, device)
        return Fragment(f"{self.name}_{work.direction}", (launch,), expected_s=expected)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, tile, epilogue)
            for tile in self._tiles
            for dtype in IN_16_BITS
            for epilogue in ((False, True) if tile.stride == 1 else (False,))
        ]

    def _tile(self, work: ConvWork, plane: Plane, device: CudaDevice) -> PairTile | None:
        """Return the tile with the least predicted time among the smallest that fit the kernel."""
        if plane.stride > 1 and (work.direction == "fwd" or not work.epilogue_free):
            return None
        reads = _columns(plane.reach[1], plane.stride, _result(work, plane)[1][1])[2]
        holding = [
            tile
            for tile in self._tiles
            if tile.stride == plane.stride
            and plane.reach[0] <= tile.kernel_rows
            and reads <= tile.units * 4
        ]
        least = min(((tile.kernel_rows, tile.units) for tile in holding), default=None)

        def cost(tile: PairTile) -> float:
            return tile.octets * tile.cost * _Cut.of(work, plane, tile).cost_and_share(device)[0]

        fitting = (tile for tile in holding if (tile.kernel_rows, tile.units) == least)
        return min(fitting, key=cost, default=None)


def _launch(work: ConvWork, device: CudaDevice, plane: Plane, tile: PairTile) -> Launch:
    """Return the launch with a tile."""
    stride, (source, result) = plane.stride, work.sides
    flipped, cut = work.direction == "fwd", _Cut.of(work, plane, tile)
    args = DepthwisePairsArgs()
    args.x_stride[:] = [stride // 8 for stride in plane.strides(source)]
    args.y_stride[:] = [stride // 8 for stride in plane.strides(result)]
    args.w_stride[:] = plane.weight_strides(work.w)
    args.batch, args.channels, args.flipped = plane.batch, work.groups, flipped
    args.x_size[:] = plane.input if flipped else plane.output
    args.y_size[:], args.pad[:] = _result(work, plane)
    args.kernel[:], args.dilation[:] = plane.reach, plane.dilation
    args.by_dilation = divider(plane.dilation[1])
    _, *steps = args.w_stride
    if flipped:
        args.w_first = sum(s * (k - 1) for s, k in zip(steps, plane.kernel, strict=True))
    args.w_step[:] = [-step if flipped else step for step in steps]
    args.left, args.first_tap, reads = _columns(plane.reach[1], stride, args.pad[1])
    args.read = reads + 4 // stride
    args.base, args.rows, args.tiles, args.strips = cut.base, cut.rows, cut.tiles, cut.strips
    args.by_rows, args.by_strips = divider(cut.rows), divider(cut.strips)
    args.by_units = divider(cut.strips + tile.more)
    args.row_bytes = cut.row_bytes
    args.alpha, args.activation = work.alpha, ACTIVATIONS[work.activation]
    args.share = share = cut.cost_and_share(device)[1]
    return Launch(
        _instance(work.dtype, tile, not work.epilogue_free),
        (cut.channel_tiles, ceil_div(cut.tiles * cut.rows, share), 1),
        (tile.threads, 1, 1),
        pack(args, x=source, w=work.w, y=result, bias=work.bias),
        cut.shared_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """A work partitioned for a tile.

    ``strips`` and ``rows`` are those of an image, with rows in units of the stride from ``base``.
    ``tiles`` cover the strips of the whole batch. ``row_bytes`` are those of a row of x in shared
    memory.
    """

    tile: PairTile
    strips: int
    base: int
    rows: int
    tiles: int
    channel_tiles: int
    row_bytes: int

    @classmethod
    def of(cls, work: ConvWork, plane: Plane, tile: PairTile) -> _Cut:
        (height, width), pad = _result(work, plane)
        strips, base = ceil_div(width, STRIP_COLUMNS), pad[0] // plane.stride
        # The most images in a tile of strips. Units of padding follow each.
        images = (TILE_STRIPS + strips - 2) // strips + 1
        pixels = (TILE_STRIPS + images * tile.more) * STRIP_COLUMNS // tile.stride
        round_pixels = tile.threads // tile.octets
        return cls(
            tile,
            strips,
            base,
            (height - 1 + pad[0]) // plane.stride - base + 1,
            ceil_div(plane.batch * strips, TILE_STRIPS),
            ceil_div(work.groups, tile.channels),
            place_bytes(tile, ceil_div(pixels, round_pixels) * round_pixels, tile.stride > 1),
        )

    @property
    def shared_bytes(self) -> int:
        results = self.tile.stride * place_bytes(self.tile, TILE_STRIPS * STRIP_COLUMNS)
        return STAGES * self.row_bytes + 2 * results

    def cost_and_share(self, device: CudaDevice) -> tuple[float, int]:
        """Return the least cost of all blocks, and the rows of a block's share for it.

        A single block does not saturate an SM. The part of a share in each tile costs its rows, its
        halo rows, and a fixed cost.
        """
        beside = ceil_div(self.tile.kernel_rows, self.tile.stride) - 1 + START_ROWS
        resident = resident_blocks(device, self.shared_bytes, self.tile.blocks)
        together = resident // device.multiprocessors
        every = self.rows * self.tiles

        def cost(share: int) -> tuple[float, int]:
            blocks = ceil_div(every, share)
            parts = blocks + self.tiles - 1 - (every - 1) // lcm(share, self.rows)
            waves, rest = divmod(blocks * self.channel_tiles, resident)
            busy: float = waves * together
            if rest:
                busy += max(ceil_div(rest, device.multiprocessors), ALONE * together)
            return busy * (share + parts / blocks * beside), share

        at_once = max(1, resident // self.channel_tiles)
        shares = {ceil_div(every, at_once * waves) for waves in range(1, 5)}
        shares |= {ceil_div(self.rows, parts) for parts in range(1, min(self.rows, MOST_PARTS) + 1)}
        return min(map(cost, shares))


def _result(work: ConvWork, plane: Plane) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size and padding of the result (in fprop, the padding of the flipped kernel)."""
    if work.direction == "bwd_data":
        return plane.input, plane.pad
    first, second = (k - 1 - pad for k, pad in zip(plane.reach, plane.pad, strict=True))
    return plane.output, (first, second)


def _why_not_full(work: ConvWork, plane: Plane) -> str | None:
    """Return why FMAs, with narrower strips, are expected to be faster for 3x3 kernels."""
    if plane.kernel != (3, 3) or plane.dilation != (1, 1) or plane.stride != 1:
        return None
    height, width = _result(work, plane)[0]
    strips = ceil_div(width, STRIP_COLUMNS)
    if width < FULL * strips * STRIP_COLUMNS:
        return f"{width} columns leave much of {strips} strips of {STRIP_COLUMNS} empty"
    elements = plane.batch * height * width * work.groups
    if elements < FEW:
        return f"{elements} elements; other families are faster on few"
    return None


def _columns(kernel: int, stride: int, pad: int) -> tuple[int, int, int]:
    """Return the columns of x for the first four columns of the result.

    These are the first column, the kernel column with which it contributes to the first result, and
    the number of columns.
    """
    left = -((kernel - 1 - pad) // stride)
    return left, pad - stride * left, (pad + 3) // stride - left + 1


def place_bytes(tile: PairTile, pixels: int, strided: bool = False) -> int:
    """Return the bytes of pixels in shared memory, whose padding depends on the stride."""
    twice_odd = tile.octets % 4 == 2
    pixel_bytes = 16 * (tile.octets if twice_odd and not strided else tile.octets | 1)
    apart_bytes = 0 if strided else 16 if twice_odd else 64
    return pixels * pixel_bytes + pixels // STRIP_COLUMNS * apart_bytes


def _instance(dtype: DType, tile: PairTile, epilogue: bool) -> Instance:
    return Instance.of(
        "depthwise/depthwise_pairs.cu",
        ELEMENT=dtype,
        KERNEL_H=tile.kernel_rows,
        **macros_of(tile, "stride", "units", "octets", "pairs"),
        STAGES=STAGES,
        BLOCKS=tile.blocks,
        EPILOGUE=epilogue,
    )
