"""Grouped fprop and dgrad with few channels per group (grouped_gather.cu)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill, fill_axes, pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import MAX_PHASES
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    LatticeAxis,
    Size4,
    box_args,
    candidate_tiles,
    lattice_axis,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    Merge,
    is_exact,
    merge_of,
    odd_chunks,
    piece_of,
    slices_of,
    why_not_grouped,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_units import (
    BLOCKS,
    WARPS,
    Unit,
    every_unit,
    unit_of,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["Box", "GroupedGather", "boxes_of"]

# Positions of a box; more would reduce occupancy.
MOST_POSITIONS = 512
# Limits of the packed coordinates of a position.
MOST_DEPTH, MOST_HEIGHT = 127, 255
MAX_GRID_YZ = 65535
MOST_SPAN = 2**32 - 2
MAX_INDEX = 2**31 - 1
# Cost model: bytes that an SM could copy during an mma of a warp.
PRODUCT_BYTES = 512
# Seconds of a launch and of such a byte, fitted on an H200 to 63 times of groups of 16 to 64
# channels. In exact float32, FMAs take so many times as long as an mma, and resident blocks share
# the SM's: fitted to half of 52 times.
START_S, BYTE_S, EXACT = 8e-6, 1.33e-11, 6.0
# Bytes that an SM could copy in the time of a piece, by its size.
PIECE_BYTES = {16: 16, 8: 27, 4: 18, 2: 34}
# Static shared memory.
PLACE_BYTES = 384


@dataclass(frozen=True, slots=True)
class Box:
    """A block's tile of positions (N, D, H, W), its number of merged groups, and its pipeline
    stages: 2 if it iterates over several boxes."""

    tile: Size4
    slice: int
    stages: int = 2

    @property
    def positions(self) -> int:
        return prod(self.tile)


PhaseArgs = structure("grouped/grouped_gather.cu", "Phase")


GroupedGatherArgs = structure("grouped/grouped_gather.cu", "GroupedGatherArgs")


class GroupedGather:
    """fwd and bwd_data with 1 to 64 channels per group, channels last.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and exact float32.
    """

    name = "grouped_gather"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := why_not_grouped(work, device)) is not None:
            return reason
        if work.in_channels == work.out_channels == 1:
            return "NaN would spread among groups of one channel, as products have several groups"
        if max(work.w.strides[1:]) * work.out_channels > MAX_INDEX:
            return f"the weights of a group span more than {MAX_INDEX} elements"
        if work.direction == "bwd_data" and max(work.stride) > MAX_PHASES:
            return f"stride {max(work.stride)} makes more than {MAX_PHASES} phases"
        axes = [lattice_axis(work, dim) for dim in range(3)]
        box = next(boxes_of(work, axes, device), None)
        if box is None:
            return "one position's taps and one group's weights do not fit in shared memory"
        boxes = prod(_tiles(work, axes, box))
        if boxes > MAX_BLOCKS:
            return f"{boxes} boxes are more than one grid holds"
        if ceil_div(merge_of(work).count, box.slice) > MAX_GRID_YZ:
            return f"{work.groups} groups are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, box: Box | None = None) -> Fragment:
        """See `Family.launches`. ``box`` overrides the chosen box."""
        backward = work.direction == "bwd_data"
        source, result = work.sides
        axes = [lattice_axis(work, dim) for dim in range(3)]
        time_s, chosen = choose_box(work, axes, device)
        box = box or chosen
        merge, unit = merge_of(work), unit_of(work)
        shape = _Shared(work, axes, merge, unit, box)

        args = GroupedGatherArgs()
        args.x_group, args.y_group = source.strides[1], result.strides[1]
        args.y_stride[:] = (result.strides[0], *result.strides[3:])
        args.w_group, args.w_stride[1:] = work.w.strides[0], work.w.strides[1:]
        size = source.dtype.itemsize
        args.x_stride.image = source.strides[0] * size
        args.x_stride.spatial[:] = [stride * size for stride in source.strides[3:]]
        args.box = box_args(
            shape.extent, shape.pitch, box.slice, shape.merge_bytes, shape.piece, WARPS * 32
        )
        args.padded, args.y_piece = merge.padded, piece_of(result, work.channels[1], merge.groups)
        args.alpha, args.beta = work.alpha, work.beta
        args.batch, args.groups = work.batch, work.groups
        args.x_channels, args.y_channels = work.channels
        args.merged, args.merges, args.slice = merge.groups, merge.count, box.slice
        args.own = merge.own
        args.w_vector, args.w_pitch = _vector(work), shape.w_pitch
        args.activation, args.plain = ACTIVATIONS[work.activation], work.epilogue_free
        args.tile[:] = box.tile
        args.tiles[:] = _tiles(work, axes, box)
        fill_axes(args, axes, "x_step", "x_tap", "lattice")
        fill_axes(args, [axis.axis for axis in axes], "x_size", "y_step", "r_step")
        for dim, axis in enumerate(axes):
            args.phases[dim] = len(axis.phases)
            for place, phase in enumerate(axis.phases):
                args.phase[dim][place] = PhaseArgs(
                    phase.taps, phase.r0, phase.x0, phase.y0, phase.count
                )
        args.stage_bytes = shape.stage_bytes
        fill(
            args,
            shape,
            "weights_at",
            "results_at",
            "sources_at",
            "digits_at",
            "steps_at",
            "rows_at",
        )
        launch = Launch(
            _instance(unit, work.dtype, backward, is_exact(work)),
            _grid(work, axes, merge, box, _resident(unit, shape, device), device),
            (WARPS * 32, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
            shape.total_bytes,
        )
        return Fragment(f"{self.name}_{work.direction}", (launch,), expected_s=time_s)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(unit, dtype, across, exact)
            for unit, dtype, exact in every_unit()
            for across in (False, True)
        ]


def choose_box(work: ConvWork, axes: list[LatticeAxis], device: CudaDevice) -> tuple[float, Box]:
    """Return the box with the least predicted time, and that in seconds. Results do not depend on
    the box."""
    # The same for all boxes, of which there may be a thousand.
    merge, unit = merge_of(work), unit_of(work)
    best, least = None, math.inf
    for box, shape in _fitting(work, axes, merge, unit, device):
        cost = _cost(work, axes, merge, unit, shape, box, device)
        if best is None or cost < least:
            best, least = (box, shape), cost
    if best is None:
        raise ValueError("work that why_not refuses")
    box, shape = best
    if is_exact(work):
        # Measured times are of boxes that are ranked by an mma's time.
        least = _cost(work, axes, merge, unit, shape, box, device, EXACT)
    return START_S + least * BYTE_S, box


class _Shared:
    """The layout of a block's shared memory."""

    def __init__(
        self, work: ConvWork, axes: list[LatticeAxis], merge: Merge, unit: Unit, box: Box
    ) -> None:
        backward = work.direction == "bwd_data"
        x_chunks = merge.out_chunks if backward else merge.in_chunks
        extents = [axis.extent(size) for axis, size in zip(axes, box.tile[1:], strict=True)]
        self.extent = (box.tile[0], *extents)
        self.chunks = x_chunks * box.slice
        self.pitch = odd_chunks(self.chunks)
        source, channels = work.sides[0], work.channels[0]
        self.piece = piece_of(source, channels, merge.groups)
        real = merge.groups * channels * work.dtype.itemsize
        self.merge_bytes = real, x_chunks * CHUNK_BYTES
        self.pieces = box.slice * real // self.piece
        self.w_pitch = odd_chunks(merge.in_chunks)
        taps = prod(axis.taps for axis in axes)
        # Warps read whole units of merges.
        merges = ceil_div(box.slice, unit.merges) * unit.merges
        tap_bytes = merge.out_channels * self.w_pitch
        self.weight_bytes = merges * (taps + 1) * tap_bytes
        positions = ceil_div(box.positions, 16) * 16
        self.stage_bytes = prod(self.extent) * self.pitch if box.stages > 1 else 0
        self.weights_at = prod(self.extent) * self.pitch * box.stages
        self.results_at = self.weights_at + self.weight_bytes
        self.sources_at = self.results_at + positions * 4
        self.digits_at = self.sources_at + positions * 4
        self.steps_at = self.digits_at + positions * 4
        steps = ceil_div(taps * x_chunks, 2)
        self.rows_at = self.steps_at + steps * 16
        end = self.rows_at + WARPS * unit.rows_bytes
        # Units also read past the last result channel.
        beyond = self.results_at + unit.columns * 8 * self.w_pitch
        self.total_bytes = max(end, beyond) + PLACE_BYTES

    @property
    def copied_bytes(self) -> float:
        """Bytes of whole chunks that are copied as fast as the box's pieces."""
        return prod(self.extent) * self.pieces * PIECE_BYTES[self.piece]


def boxes_of(work: ConvWork, axes: list[LatticeAxis], device: CudaDevice) -> Iterator[Box]:
    """Yield candidates that fit into shared memory."""
    return (box for box, _ in _fitting(work, axes, merge_of(work), unit_of(work), device))


def _fitting(
    work: ConvWork, axes: list[LatticeAxis], merge: Merge, unit: Unit, device: CudaDevice
) -> Iterator[tuple[Box, _Shared]]:
    """Yield the candidates of `boxes_of` with their layouts."""
    together = work.sides[0].strides[1] == work.channels[0]
    slices = slices_of(merge, together)
    steps = (1, 4, 8) if unit.windows else (1, 1, 1)
    counts = [axis.count for axis in axes]
    for slice_ in slices:
        for tile in candidate_tiles(work.batch, counts, steps):
            if tile[1] > MOST_DEPTH or tile[2] > MOST_HEIGHT:
                continue
            for box in (Box(tile, slice_, stages) for stages in (1, 2)):
                if box.positions > MOST_POSITIONS or _span(work, axes, box) > MOST_SPAN:
                    continue
                shape = _Shared(work, axes, merge, unit, box)
                if shape.pieces > WARPS * 32:
                    continue
                if shape.total_bytes <= device.shared_bytes_per_block:
                    yield box, shape


def _span(work: ConvWork, axes: list[LatticeAxis], box: Box) -> int:
    """Return the distance in elements from a box's first result to its last."""
    strides = work.result.strides
    steps = [axis.axis.y_step for axis in axes]
    spatial = zip(box.tile[1:], steps, strides[3:], strict=True)
    return (box.tile[0] - 1) * strides[0] + sum(
        (size - 1) * step * stride for size, step, stride in spatial
    )


def _cost(
    work: ConvWork,
    axes: list[LatticeAxis],
    merge: Merge,
    unit: Unit,
    shape: _Shared,
    box: Box,
    device: CudaDevice,
    exact: float = 0.0,
) -> float:
    """Return the cost in units of the bytes that an SM could copy in that time.

    ``exact`` is the time of an mma's FMAs, which are shared among resident blocks, over that of an
    mma.
    """
    backward = work.direction == "bwd_data"
    result, channels = work.result, work.channels[1]
    piece = piece_of(result, channels, merge.groups)
    pieces = merge.groups * channels * work.dtype.itemsize // piece
    stored = ceil_div(box.positions, 64) * 64 * box.slice * pieces * PIECE_BYTES[piece]
    per_box = shape.copied_bytes + 2 * stored + 2048
    # Arranging weights takes more instructions than copying a box.
    per_block = 2 * shape.weight_bytes + 16384
    resident = _resident(unit, shape, device)
    workers, slices, phases = _grid(work, axes, merge, box, resident, device)
    boxes = ceil_div(prod(_tiles(work, axes, box)), workers)
    blocks = workers * slices * phases
    together = min(resident, ceil_div(blocks, device.multiprocessors))
    waves = ceil_div(blocks, device.multiprocessors * resident)
    # Fewer concurrent blocks, or fewer copies, hide less latency.
    hidden = 1.0 + 1.2 / together + 0.2 / min(boxes, 2)
    copied = together * (per_block + boxes * per_box) * hidden
    product = PRODUCT_BYTES * (exact * together or 1.0)
    return waves * (copied + boxes * _products(axes, merge, unit, box, backward) * product)


def _products(axes: list[LatticeAxis], merge: Merge, unit: Unit, box: Box, backward: bool) -> int:
    """Return the number of mma instructions of a warp for a box."""
    read, written = merge.in_chunks, merge.out_channels
    if backward:
        read, written = merge.out_chunks, merge.in_channels
    units = (
        ceil_div(box.positions, 16 * unit.fragments)
        * ceil_div(box.slice, unit.merges)
        * ceil_div(written, 8 * unit.columns)
    )
    steps = ceil_div(prod(axis.taps for axis in axes) * read, 2)
    return ceil_div(units, WARPS) * steps * unit.fragments * unit.merges * unit.columns


def _resident(unit: Unit, shape: _Shared, device: CudaDevice) -> int:
    """Return the resident blocks per SM."""
    return max(1, min(BLOCKS, device.fitting_blocks(shape.total_bytes)))


def _tiles(work: ConvWork, axes: list[LatticeAxis], box: Box) -> Size4:
    spatial = [ceil_div(axis.count, size) for axis, size in zip(axes, box.tile[1:], strict=True)]
    return (ceil_div(work.batch, box.tile[0]), spatial[0], spatial[1], spatial[2])


def _grid(
    work: ConvWork,
    axes: list[LatticeAxis],
    merge: Merge,
    box: Box,
    resident: int,
    device: CudaDevice,
) -> tuple[int, int, int]:
    """Return the grid: blocks over boxes (at most those resident at once), slices, phases."""
    slices = ceil_div(merge.count, box.slice)
    phases = prod(len(axis.phases) for axis in axes)
    boxes = prod(_tiles(work, axes, box))
    if box.stages == 1:
        return boxes, slices, phases
    workers = max(1, min(boxes, resident * device.multiprocessors // (slices * phases)))
    return ceil_div(boxes, ceil_div(boxes, workers)), slices, phases


def _vector(work: ConvWork) -> int:
    """Return the number of weights per vector load, all of one group."""
    chunk = merge_of(work).chunk
    strides = work.w.strides
    for vector in (chunk, chunk // 2):
        others = (*strides[:2], *strides[3:])
        if (
            strides[2] == 1
            and work.in_channels % vector == 0
            and not any(stride % vector for stride in others)
        ):
            return vector
    return 1


def _instance(unit: Unit, dtype: DType, across: bool, exact: bool) -> Instance:
    return Instance.of("grouped/grouped_gather.cu", **unit.defines(dtype, across, exact))
