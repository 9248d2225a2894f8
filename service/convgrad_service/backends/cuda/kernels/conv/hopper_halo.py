"""Dense fprop and dgrad with few channels on Hopper (hopper_halo.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    pixels_beside,
    stores_planes,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_halo_tables import CHUNK
from convgrad_service.backends.cuda.kernels.conv.hopper_halo_tiles import (
    COLUMNS,
    HaloTile,
    halo_tiles,
    some_tile_fits,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, gather_axes
from convgrad_service.backends.cuda.kernels.core.limits import IN_16_BITS, Requirements
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    in_whole_chunks,
    overlapping,
    prepare_side,
    prepare_weight,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HopperHalo"]

MAX_TAPS = 128
LEAST_CHANNELS = 16
# Beyond these, other families are faster (measured on an H200).
LEAST_TAPS, MOST_READ, MOST_WRITTEN = 9, 128, 96
MAX_EXTENT, MAX_KERNEL, MAX_BOX = 2**28, 127, 256
MAX_INDEX = 2**31 - 1
THREADS = 384
CLOCKS_A_SECOND = 1.7e9  # SM clock of an H200 under load


HopperHaloArgs = structure("conv/hopper_halo_args.cuh", "HopperHaloArgs")


NEEDS = Requirements(IN_16_BITS, hopper=True)


class HopperHalo:
    """fwd and bwd_data in 16-bit types.

    Loads each pixel of a tile and its halo once; all taps read it from shared memory.
    """

    name = "hopper_halo"

    def __init__(self, *, anything: bool = False) -> None:
        """Create the family; with ``anything``, it also takes work at which others are faster."""
        self._anything = anything

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Splitting along N, D or H does not change the answer."""
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        channels = work.in_channels, work.out_channels
        if min(channels) < LEAST_CHANNELS:
            return f"{channels[0]} and {channels[1]} channels would leave most of a product"
        if max(work.stride) > 1:
            return f"a stride of {work.stride}: each phase has few taps for a slice"
        if not self._anything and (reason := _slower(work)) is not None:
            return reason
        if max(work.kernel) > MAX_KERNEL or work.taps > MAX_TAPS:
            return f"a kernel of {work.kernel}"
        reach = max(*work.input, *work.output, *(abs(pad) for pad in work.pad))
        if reach > MAX_EXTENT:
            return f"positions reach {reach}, beyond {MAX_EXTENT}"
        if max(work.result.strides[4:]) * MAX_BOX * 2 > MAX_INDEX:
            return f"a stride of {max(work.result.strides[4:])} elements between rows of the result"
        axes = gather_axes(work)
        if not some_tile_fits(work, axes, device):
            return "no tile and its halo fit into shared memory"
        return None

    def launches(
        self, work: ConvWork, device: CudaDevice, tile: HaloTile | None = None
    ) -> Fragment:
        """See `Family.launches`. ``tile`` overrides the chosen tile."""
        backward = work.direction == "bwd_data"
        result = work.result
        axes = gather_axes(work)
        if tile is None:
            tile = halo_tiles(work, axes, device)[0]
        written = tile.problem.channels[1]
        x = prepare_side(work, "source", device)
        w = prepare_weight(work, device)
        before = overlapping((*x.steps, *w.steps), device)
        args = HopperHaloArgs()
        args.y_stride[:] = result.strides
        args.alpha, args.beta = work.alpha, work.beta
        args.out_channels = written
        args.activation, args.plain = ACTIVATIONS[work.activation], work.epilogue_free
        size = work.sizes[1]
        args.wide_stores = in_whole_chunks(result, (work.batch, 1, written, *size), 2)
        if stores_planes(work):
            # Rows of a tile, with and without halo, must start and end at a group's boundary.
            args.planes = next(
                group
                for group in ((8, 2, 1) if tile.staged else (2, 1))
                if group == 1
                or not (
                    pixels_beside(work) % group
                    or tile.extent[2] % group
                    or size[2] % group
                    or tile.row_pixels % 2
                )
            )
        tile.describe(args)
        maps = {
            "x_map": (x.operand, _source_map(work, x.operand, axes, tile)),
            "w_map": (w.operand, _weight_map(work, w.operand, tile, backward=backward)),
        }
        launch = Launch(
            _instance(work.dtype, tile.columns, backward=backward),
            (min(tile.count, device.multiprocessors), 1, 1),
            (THREADS, 1, 1),
            pack_maps(args, maps, y=result, accumulate=work.accumulate, bias=work.bias),
            tile.dynamic_bytes,
            overlaps=bool(before),
        )
        return Fragment(
            f"{self.name}_{work.direction}_{tile.name}",
            (*before, launch),
            (*x.workspace, *w.workspace),
            expected_s=tile.clocks(device) / CLOCKS_A_SECOND + x.expected_s,
        )

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> HopperHalo | None:
        """See `Tunable.tuned`. There is one configuration."""
        return self if not config else None

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, columns, backward=backward)
            for dtype in IN_16_BITS
            for backward in (False, True)
            for columns in COLUMNS
        ]


def _slower(work: ConvWork) -> str | None:
    """Return why another kernel is at least as fast (measured on an H200), or None."""
    read, written = work.channels
    if work.taps < LEAST_TAPS:
        return f"{work.taps} taps for a slice"
    if read > MOST_READ or written > MOST_WRITTEN:
        return f"{read} to {written} channels: all weights are read for each tile"
    return None


def _bytes(operand: Operand, strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides in bytes for a tensor map, with a valid one in dimensions of extent 1."""
    return tuple(max(stride * operand.dtype.itemsize, 16) for stride in strides)


def _whole(channels: int) -> int:
    """Return channels rounded up to 16-byte chunks, which prepared operands pad with zeros."""
    return ceil_div(channels, 8) * 8


def _source_map(work: ConvWork, operand: Operand, axes: Sequence[Axis], tile: HaloTile) -> TiledMap:
    n, _, _, d, h, w = operand.strides
    return TiledMap(
        dtype=operand.dtype,
        sizes=(
            _whole(tile.problem.channels[0]),
            *(axis.x_size for axis in reversed(axes)),
            work.batch,
        ),
        strides=_bytes(operand, (w, h, d, n)),
        swizzle=2 * CHUNK,
        box=(CHUNK, tile.row_pixels, tile.rows, 1, 1),
    )


def _weight_map(work: ConvWork, operand: Operand, tile: HaloTile, *, backward: bool) -> TiledMap:
    _, k, _, t, r, s = operand.strides
    channels, halves = (32, 2) if tile.twice else (64, 1)
    kernel = work.kernel[0], work.kernel[2], work.kernel[1]
    box = (channels, CHUNK) if backward else (CHUNK, channels)
    return TiledMap(
        dtype=operand.dtype,
        sizes=(_whole(work.in_channels), work.out_channels, *kernel),
        strides=_bytes(operand, (k, t, s, r)),
        swizzle=2 * box[0],
        box=(*box, halves, tile.tables.run, 1),
    )


def _instance(dtype: DType, columns: int, *, backward: bool) -> Instance:
    return Instance.of(
        "conv/hopper_halo.cu", HOPPER, ELEMENT=dtype, ACROSS=backward, COLUMNS=columns
    )
