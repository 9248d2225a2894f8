"""Depthwise fprop and dgrad on tensor cores (depthwise_mma.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, CUDA_TYPES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_strips import (
    DTYPES,
    STRIP_COLUMNS,
    TILE_STRIPS,
    Strips,
    StripTiling,
    line_bytes,
    plane_bytes,
    plane_of_strips,
    variant,
    variants,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    LinearCost,
    Plane,
    chunk_rows,
    fill_operands,
    plane_and_tile,
    resident_blocks,
    why_not_launched,
    why_not_plane,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["MMA_TILES", "DepthwiseMma", "MmaTile"]

COST = LinearCost(5.04, 0.363, 0.0065, 0.942)


@dataclass(frozen=True, slots=True)
class MmaTile:
    """A tile shape.

    Attributes
    ----------
    kernel_rows
        The most kernel rows.
    units
        Units of 8 columns that a strip reads.
    warps, own
        Warps of a block, and channels of a warp.
    rows, stages
        Rows between barriers, and pipeline stages of that many rows.
    late
        Whether the copies of a step are issued after its computation.
    blocks
        Blocks per SM.
    start
        Fixed cost of a block, in rows.
    """

    kernel_rows: int
    stride: int
    backward: bool
    units: int
    warps: int = 8
    rows: int = 1
    late: bool = True
    stages: int = 4
    blocks: int = 2
    own: int = 2
    epilogues: bool = True
    start: int = 4

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.warps * self.own


# The first that fits a kernel is used. dgrad with stride 1 is fprop with a flipped kernel.
MMA_TILES = (
    MmaTile(3, 1, False, 2),
    MmaTile(5, 1, False, 2, late=False),
    MmaTile(7, 1, False, 2),
    MmaTile(13, 1, False, 3, blocks=1, epilogues=False),
    MmaTile(3, 2, False, 3),
    MmaTile(5, 2, False, 3),
    MmaTile(7, 2, False, 3),
    MmaTile(3, 2, True, 2),
    MmaTile(5, 2, True, 2, blocks=1),
)


DepthwiseMmaArgs = structure("depthwise/depthwise_mma.cu", "DepthwiseMmaArgs")


class DepthwiseMma:
    """fwd and bwd_data in 16-bit types with one channel per group, channels last."""

    name = "depthwise_mma"

    def __init__(self, tiles: tuple[MmaTile, ...] = MMA_TILES) -> None:
        self._tiles = tiles

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_plane(work, general=True)
        if reason is not None:
            return reason
        if work.direction == "bwd_data" and work.out_channels > 1:
            return f"sums over {work.out_channels} channels"
        plane = plane_of_strips(work)
        if isinstance(plane, str):
            return plane
        tile = self._tile(work, plane)
        if tile is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        launch = self.launch(work, device, plane, tile)
        return why_not_launched(launch, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        plane, tile = plane_and_tile(work, lambda plane: self._tile(work, plane))
        launch = self.launch(work, device, plane, tile)
        return Fragment(
            f"{self.name}_{work.direction}", (launch,), expected_s=COST.expected_s(work, device)
        )

    def launch(
        self,
        work: ConvWork,
        device: CudaDevice,
        plane: Plane,
        tile: MmaTile,
        chunk: int | None = None,
    ) -> Launch:
        """Return the launch with a tile and ``chunk`` rows (in dgrad, times the stride)."""
        backward, stride, pad = work.direction == "bwd_data", plane.stride, plane.pad
        source, result = work.sides
        sizes = plane.output, plane.input
        x_size, y_size = sizes if backward else sizes[::-1]
        rows, columns = y_size
        flipped = backward and not tile.backward
        if flipped:
            pad = plane.reach[0] - 1 - pad[0], plane.reach[1] - 1 - pad[1]
        if tile.backward:
            # In units of the stride, from the last multiple of it that is at most the padding.
            rows, columns = (
                ceil_div(extent + before, stride) - before // stride
                for extent, before in zip(y_size, pad, strict=True)
            )
        apart = 1 if tile.backward else stride
        strips = Strips(plane.batch, ceil_div(columns, STRIP_COLUMNS), apart, tile.units)
        channels = tile.channels
        channel_tiles = ceil_div(work.groups * work.out_channels, channels)
        shared_bytes = _shared_bytes(tile, strips.slots)
        items = strips.tiles * channel_tiles
        blocks, architectures = variant(
            tile.kernel_rows, _blocks(tile, not work.epilogue_free), device
        )
        if chunk is None:
            reach = ceil_div(tile.kernel_rows, stride) - 1
            resident = resident_blocks(device, shared_bytes, blocks)
            chunk = chunk_rows(rows, reach, items, resident, tile.start)
        chunks = ceil_div(rows, chunk)

        args = DepthwiseMmaArgs()
        fill_operands(args, work, plane, source, result)
        args.x_pitch, args.y_pitch = args.x_stride[1] // 8, args.y_stride[1] // 4
        args.activation = ACTIVATIONS[work.activation]
        args.channels = work.groups * work.out_channels
        args.x_channels, args.multiplier = work.groups, work.out_channels
        args.x_size[:], args.y_size[:], args.pad[:] = x_size, y_size, pad
        args.kernel[:], args.dilation[:], args.flipped = plane.reach, plane.dilation, flipped
        args.tiling = StripTiling(
            strips.count, strips.units, strips.slots, strips.tiles, chunks, chunk, channel_tiles
        )
        return Launch(
            _instance(work.dtype, tile, not work.epilogue_free, blocks, architectures),
            (items * chunks, 1, 1),
            (tile.warps * 32, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
            shared_bytes,
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, tile, epilogue, blocks, architectures)
            for tile in self._tiles
            for dtype in DTYPES
            for epilogue in (False, True)
            if tile.epilogues or not epilogue
            for blocks, architectures in variants(tile.kernel_rows, _blocks(tile, epilogue))
        ]

    def _tile(self, work: ConvWork, plane: Plane) -> MmaTile | None:
        """Return the first tile that fits the kernel."""
        backward = work.direction == "bwd_data" and plane.stride > 1
        rows, columns = plane.reach
        for tile in self._tiles:
            if backward:
                read = STRIP_COLUMNS + (columns - 1) // plane.stride
            else:
                read = (STRIP_COLUMNS - 1) * plane.stride + columns
            if (
                (tile.backward, tile.stride) == (backward, plane.stride)
                and rows <= tile.kernel_rows
                and read <= tile.units * STRIP_COLUMNS
                and (tile.epilogues or work.epilogue_free)
            ):
                return tile
        return None


def _shared_bytes(tile: MmaTile, slots: int) -> int:
    channels = tile.channels
    phases = tile.stride if tile.backward else 1
    results = phases * phases * channels * (TILE_STRIPS + 1) * 16
    rows = tile.stages * tile.rows * plane_bytes(slots, channels)
    # Pairs of taps: their indices along K, times the columns of a result.
    last = tile.units * STRIP_COLUMNS - 2
    pairs = last + 1 + (STRIP_COLUMNS - 1) * tile.stride
    if tile.backward:
        pairs = (STRIP_COLUMNS + last) * tile.stride
    taps = channels * tile.kernel_rows * pairs * 4
    return rows + max(2 * tile.rows * (line_bytes(slots, channels) + results), taps)


def _blocks(tile: MmaTile, epilogue: bool) -> int:
    """Return the blocks per SM; an epilogue takes registers."""
    return max(1, tile.blocks - epilogue)


def _instance(
    dtype: DType, tile: MmaTile, epilogue: bool, blocks: int, architectures: tuple[str, ...]
) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL_H": tile.kernel_rows,
        "STRIDE": tile.stride,
        "BACKWARD": int(tile.backward),
        "UNITS": tile.units,
        "WARPS": tile.warps,
        "CHANNELS": tile.own,
        "ROWS": tile.rows,
        "LATE": int(tile.late),
        "STAGES": tile.stages,
        "BLOCKS": blocks,
        "EPILOGUE": int(epilogue),
    }
    return Instance.of("depthwise/depthwise_mma.cu", defines, architectures)
