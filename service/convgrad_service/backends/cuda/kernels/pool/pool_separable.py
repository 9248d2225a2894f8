"""Max pooling's gradient from its input: any windows, channels last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import PoolWork, Size3

__all__ = ["PoolSeparable", "Tile"]

THREADS = 512
# A block's channels are whole sectors of memory.
CHANNELS = {DType.FLOAT16: 16, DType.BFLOAT16: 16, DType.FLOAT32: 8}
# Shared memory for each position: its key, a sum, two positions of maxima.
KEY_BYTES = {DType.FLOAT16: 4, DType.BFLOAT16: 4, DType.FLOAT32: 8}
SUM_BYTES, PLACE_BYTES = 4, 2
# Positions have 16 bits; one value means none.
MOST_POSITIONS = 2**16 - 2
# Numbers of tiles along an extent.
TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
# Fixed cost of a block, in positions.
START_POSITIONS = 128


PoolSeparableArgs = structure("pool/pool_separable.cu", "PoolSeparableArgs")


@dataclass(frozen=True, slots=True)
class Tile:
    """A block's own positions, and those of the largest box around them, along D, H and W."""

    own: Size3
    box: Size3

    @classmethod
    def of(cls, work: PoolWork, own: Size3) -> Tile:
        box = [_box(work, dim, extent) for dim, extent in enumerate(own)]
        return cls(own, (box[0], box[1], box[2] | 1))

    @property
    def positions(self) -> int:
        return prod(self.box)


class PoolSeparable:
    """bwd from the input, channels last."""

    name = "pool_separable"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.dtype not in CHANNELS:
            return f"{work.dtype}"
        if not all(operand.channels_last for operand in (work.source, work.x, work.y)):
            return "the channels are not contiguous"
        if image_elements(work) >= 2**31:
            return "an image of more than 2^31 elements"
        tile = _tile(work, device)
        if tile is None:
            return f"windows of {work.kernel}, whose boxes do not fit in shared memory"
        if _blocks(work, tile) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        tile = _tile(work, device)
        if tile is None:
            raise ValueError("too large windows")
        args = PoolSeparableArgs()
        fill_strides(args, work, 3)
        args.channels = work.channels
        args.channel_tiles = ceil_div(work.channels, CHANNELS[work.dtype])
        args.x_size[:], args.y_size[:] = work.input, work.output
        for name in ("kernel", "stride", "dilation", "pad"):
            getattr(args, name)[:] = getattr(work, name)
        args.own[:], args.box[:] = tile.own, tile.box
        args.tiles[:] = _tiles(work, tile)
        slots = tile.positions * CHANNELS[work.dtype]
        args.sums_at = slots * KEY_BYTES[work.dtype]
        args.places_at = args.sums_at + slots * SUM_BYTES
        launch = Launch(
            _instance(work.dtype),
            (_blocks(work, tile), 1, 1),
            (THREADS, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
            _shared_bytes(work.dtype, tile),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(dtype) for dtype in CHANNELS]


def _box(work: PoolWork, dim: int, own: int) -> int:
    """Return the positions in all windows that overlap ``own`` adjacent positions."""
    stride, reach = work.stride[dim], (work.kernel[dim] - 1) * work.dilation[dim]
    windows = min((own - 1 + reach) // stride + 1, work.output[dim])
    return (windows - 1) * stride + reach + 1


def _tile(work: PoolWork, device: CudaDevice) -> Tile | None:
    """Return the tile that fits with the fewest positions in all boxes; all give the same bits."""
    channels, each = CHANNELS[work.dtype], _position_bytes(work.dtype)
    most = min(device.shared_bytes_per_block // (channels * each), MOST_POSITIONS)
    # For each dimension: tiles, positions of a box, own positions.
    cuts = [
        sorted({(ceil_div(extent, own), _box(work, dim, own), own) for own in _owns(extent)})
        for dim, extent in enumerate(work.input)
    ]
    best: tuple[int, Size3] | None = None
    for d, h, w in product(*cuts):
        positions = d[1] * h[1] * (w[1] | 1)
        if positions > most:
            continue
        cost = d[0] * h[0] * w[0] * (positions + START_POSITIONS), (d[2], h[2], w[2])
        best = cost if best is None else min(best, cost)
    return None if best is None else Tile.of(work, best[1])


def _owns(extent: int) -> set[int]:
    return {ceil_div(extent, parts) for parts in TILES}


def _tiles(work: PoolWork, tile: Tile) -> Size3:
    """Return the tiles along D, H and W."""
    d, h, w = (ceil_div(extent, own) for extent, own in zip(work.input, tile.own, strict=True))
    return d, h, w


def _blocks(work: PoolWork, tile: Tile) -> int:
    channel_tiles = ceil_div(work.channels, CHANNELS[work.dtype])
    return work.batch * channel_tiles * prod(_tiles(work, tile))


def _shared_bytes(dtype: DType, tile: Tile) -> int:
    return tile.positions * CHANNELS[dtype] * _position_bytes(dtype)


def _position_bytes(dtype: DType) -> int:
    return KEY_BYTES[dtype] + SUM_BYTES + 2 * PLACE_BYTES


def _instance(dtype: DType) -> Instance:
    defines = {"ELEMENT": CUDA_TYPES[dtype], "CHANNELS": CHANNELS[dtype], "THREADS": THREADS}
    return Instance.of("pool/pool_separable.cu", defines)
