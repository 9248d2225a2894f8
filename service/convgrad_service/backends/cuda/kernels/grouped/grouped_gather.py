"""Grouped fprop and dgrad with few channels per group (grouped_gather.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill, fill_axes, pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import MAX_PHASES
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    Size4,
    box_args,
    candidate_tiles,
    lattice_axis,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
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
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["Box", "GroupedGather", "boxes_of"]

# Positions of a box; more would reduce occupancy.
MOST_POSITIONS = 512
# Limits of the packed coordinates of a position.
MOST_DEPTH, MOST_HEIGHT = 127, 255
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


class GroupedGather(Solver[ConvWork, Box]):
    """fwd and bwd_data with 1 to 64 channels per group, channels last.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and exact float32.
    """

    name = "grouped_gather"

    def solve(self, work: ConvWork, device: CudaDevice) -> Box | str:
        """See `Solver.solve`. Results do not depend on the box."""
        if (reason := why_not_grouped(work, device)) is not None:
            return reason
        if work.in_channels == work.out_channels == 1:
            return "NaN would spread among groups of one channel, as products have several groups"
        if max(work.w.strides[1:]) * work.out_channels > MAX_INDEX:
            return f"the weights of a group span more than {MAX_INDEX} elements"
        if work.direction == "bwd_data" and max(work.stride) > MAX_PHASES:
            return f"stride {max(work.stride)} makes more than {MAX_PHASES} phases"
        gather, least, best = _Gather(work), float("inf"), None
        for boxes in _fitting(gather, device):
            costs = boxes.cost(device)
            at = int(costs.argmin())
            if costs[at] < least:
                least, best = costs[at], boxes.box(at)
        return best or "one position's taps and one group's weights do not fit in shared memory"

    def fragment(self, work: ConvWork, device: CudaDevice, box: Box) -> Fragment:
        source, result = work.sides
        gather = _Gather(work)
        axes, merge = gather.axes, gather.merge
        shape = _Boxes(gather, box.tile, box.slice, box.stages)
        args = GroupedGatherArgs()
        args.x_group, args.y_group = source.strides[1], result.strides[1]
        args.y_stride[:] = (result.strides[0], *result.strides[3:])
        args.w_group, args.w_stride[1:] = work.w.strides[0], work.w.strides[1:]
        size = source.dtype.itemsize
        args.x_stride.image = source.strides[0] * size
        args.x_stride.spatial[:] = [stride * size for stride in source.strides[3:]]
        args.box = box_args(
            shape.extent, shape.pitch, box.slice, gather.merge_bytes, gather.piece, WARPS * 32
        )
        args.padded, args.own, args.y_piece = merge.padded, merge.own, gather.y_piece
        args.x_channels, args.y_channels = work.channels
        args.merged, args.merges, args.slice = merge.groups, merge.count, box.slice
        args.w_vector, args.w_pitch = _vector(work), gather.w_pitch
        args.activation, args.plain = ACTIVATIONS[work.activation], work.epilogue_free
        args.tile[:], args.tiles[:] = box.tile, shape.tiles
        fill(args, work, "alpha", "beta", "batch", "groups")
        fill_axes(args, axes, "x_step", "x_tap", "lattice")
        fill_axes(args, [axis.axis for axis in axes], "x_size", "y_step", "r_step")
        for dim, axis in enumerate(axes):
            args.phases[dim] = len(axis.phases)
            for place, phase in enumerate(axis.phases):
                args.phase[dim][place] = PhaseArgs(
                    phase.taps, phase.r0, phase.x0, phase.y0, phase.count
                )
        fill(args, shape, "stage_bytes", "weights_at", "results_at", "sources_at", "digits_at")
        fill(args, shape, "steps_at", "rows_at")
        launch = Launch(
            _instance(gather.unit, work.dtype, gather.backward, gather.exact),
            shape.grid(device),
            (WARPS * 32, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
            int(shape.total_bytes),
        )
        time_s = START_S + float(shape.cost(device, exact=gather.exact)) * BYTE_S
        return Fragment(f"{self.name}_{work.direction}", (launch,), expected_s=time_s)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(unit, dtype, across, exact)
            for unit, dtype, exact in every_unit()
            for across in (False, True)
        ]


class _Gather:
    """What all boxes of a work have in common."""

    def __init__(self, work: ConvWork) -> None:
        self.work, self.backward, self.exact = work, work.direction == "bwd_data", is_exact(work)
        self.axes = [lattice_axis(work, dim) for dim in range(3)]
        self.merge = merge = merge_of(work)
        self.unit: Unit = unit_of(work)
        self.phases = prod(len(axis.phases) for axis in self.axes)
        self.taps = prod(axis.taps for axis in self.axes)
        (source, result), (read, written) = work.sides, work.channels
        self.piece, self.y_piece = (
            piece_of(operand, channels, merge.groups)
            for operand, channels in ((source, read), (result, written))
        )
        sides = (merge.in_chunks, merge.out_channels), (merge.out_chunks, merge.in_channels)
        self.x_chunks, self.y_channels = sides[self.backward]
        self.w_pitch = odd_chunks(merge.in_chunks)
        # Of a merge of the source: in memory, and in a box.
        x_bytes, self.y_bytes = (merge.groups * n * work.dtype.itemsize for n in (read, written))
        self.merge_bytes = x_bytes, self.x_chunks * CHUNK_BYTES
        self.steps = ceil_div(self.taps * self.x_chunks, 2)


class _Boxes:
    """The layout of a block's shared memory with a box; ``tile`` and ``stages`` may be those of
    many boxes, as arrays, and then so are all numbers that depend on them."""

    def __init__(self, gather: _Gather, tile: Any, slice_: int, stages: Any) -> None:
        self._gather, self.tile, self._slice, self._stages = gather, tile, slice_, stages
        merge, unit, axes = gather.merge, gather.unit, gather.axes
        extents = [axis.extent(size) for axis, size in zip(axes, tile[1:], strict=True)]
        self.extent = (tile[0], *extents)
        spatial = [ceil_div(axis.count, size) for axis, size in zip(axes, tile[1:], strict=True)]
        self.tiles = (ceil_div(gather.work.batch, tile[0]), *spatial)
        self.pitch = odd_chunks(gather.x_chunks * slice_)
        self.pieces = slice_ * gather.merge_bytes[0] // gather.piece
        self.positions = prod(tile)
        box_bytes = prod(self.extent) * self.pitch
        # Warps read whole units of merges.
        merges = ceil_div(slice_, unit.merges) * unit.merges
        self.weight_bytes = merges * (gather.taps + 1) * merge.out_channels * gather.w_pitch
        places = ceil_div(self.positions, 16) * 16
        self.stage_bytes = box_bytes * (stages > 1)
        self.weights_at = box_bytes * stages
        self.results_at = self.weights_at + self.weight_bytes
        self.sources_at = self.results_at + places * 4
        self.digits_at = self.sources_at + places * 4
        self.steps_at = self.digits_at + places * 4
        self.rows_at = self.steps_at + gather.steps * 16
        end = self.rows_at + WARPS * unit.rows_bytes
        # Units also read past the last result channel.
        beyond = self.results_at + unit.columns * 8 * gather.w_pitch
        self.total_bytes = np.maximum(end, beyond) + PLACE_BYTES

    def fitting(self, device: CudaDevice) -> Any:
        """Return which boxes are possible, in an array of bool."""
        work, (images, *sizes) = self._gather.work, self.tile
        strides, steps = work.result.strides, [axis.axis.y_step for axis in self._gather.axes]
        # From a box's first result to its last, in elements.
        span = (images - 1) * strides[0] + sum(
            (size - 1) * step * stride
            for size, step, stride in zip(sizes, steps, strides[3:], strict=True)
        )
        return (
            (self.positions <= MOST_POSITIONS)
            & (sizes[0] <= MOST_DEPTH)
            & (sizes[1] <= MOST_HEIGHT)
            & (span <= MOST_SPAN)
            & (self.pieces <= WARPS * 32)
            & (self.total_bytes <= device.shared_bytes_per_block)
        )

    def box(self, index: int) -> Box:
        """Return one of many."""
        n, d, h, w = (int(size[index]) for size in self.tile)
        return Box((n, d, h, w), self._slice, int(self._stages[index]))

    def resident(self, device: CudaDevice) -> Any:
        """Return the resident blocks per SM."""
        return np.clip(device.fitting_blocks(self.total_bytes), 1, BLOCKS)

    def workers(self, device: CudaDevice) -> Any:
        """Return the blocks that iterate over boxes: at most those resident at once."""
        boxes, slices = prod(self.tiles), ceil_div(self._gather.merge.count, self._slice)
        at_once = self.resident(device) * device.multiprocessors
        most = np.clip(at_once // (slices * self._gather.phases), 1, boxes)
        return np.where(self._stages == 1, boxes, ceil_div(boxes, ceil_div(boxes, most)))

    def grid(self, device: CudaDevice) -> tuple[int, int, int]:
        """Return the grid of a single box: blocks over boxes, slices, phases."""
        gather = self._gather
        slices = ceil_div(gather.merge.count, self._slice)
        return int(self.workers(device)), slices, gather.phases

    def cost(self, device: CudaDevice, *, exact: bool = False) -> Any:
        """Return the cost in units of the bytes that an SM could copy in that time.

        ``exact`` counts the FMAs of exact float32. Boxes are ranked without it, since those whose
        times were measured are.
        """
        gather = self._gather
        copied = prod(self.extent) * self.pieces * PIECE_BYTES[gather.piece]
        pieces = gather.y_bytes // gather.y_piece
        stored = ceil_div(self.positions, 64) * 64 * self._slice * pieces
        per_box = copied + 2 * (stored * PIECE_BYTES[gather.y_piece]) + 2048
        # Arranging weights takes more instructions than copying a box.
        per_block = 2 * self.weight_bytes + 16384
        resident, workers = self.resident(device), self.workers(device)
        boxes = ceil_div(prod(self.tiles), workers)
        blocks = workers * ceil_div(gather.merge.count, self._slice) * gather.phases
        together = np.minimum(resident, ceil_div(blocks, device.multiprocessors))
        waves = ceil_div(blocks, device.multiprocessors * resident)
        # Fewer concurrent blocks, or fewer copies, hide less latency.
        hidden = 1.0 + 1.2 / together + 0.2 / np.minimum(boxes, 2)
        of_block = together * (per_block + boxes * per_box) * hidden
        product = PRODUCT_BYTES * (EXACT * together if exact else 1.0)
        return waves * (of_block + boxes * self._products() * product)

    def _products(self) -> Any:
        """Return the number of mma instructions of a warp for a box."""
        gather, unit = self._gather, self._gather.unit
        units = (
            ceil_div(self.positions, 16 * unit.fragments)
            * ceil_div(self._slice, unit.merges)
            * ceil_div(gather.y_channels, 8 * unit.columns)
        )
        each = unit.fragments * unit.merges * unit.columns
        return ceil_div(units, WARPS) * gather.steps * each


def _fitting(gather: _Gather, device: CudaDevice) -> Iterator[_Boxes]:
    """Yield the candidates that fit into shared memory, those of a slice together."""
    work = gather.work
    steps = (1, 4, 8) if gather.unit.windows else (1, 1, 1)
    counts = [axis.count for axis in gather.axes]
    tiles = np.array(list(candidate_tiles(work.batch, counts, steps)), np.int64)
    tile, stages = np.repeat(tiles, 2, axis=0).T, np.tile([1, 2], len(tiles))
    for slice_ in slices_of(gather.merge, work.sides[0].strides[1] == work.channels[0]):
        fits = _Boxes(gather, tile, slice_, stages).fitting(device)
        if fits.any():
            yield _Boxes(gather, tile[:, fits], slice_, stages[fits])


def boxes_of(work: ConvWork, device: CudaDevice) -> Iterator[Box]:
    """Yield the candidates that fit into shared memory."""
    for boxes in _fitting(_Gather(work), device):
        yield from map(boxes.box, range(len(boxes.positions)))


def _vector(work: ConvWork) -> int:
    """Return the number of weights per vector load, all of one group."""
    chunk, strides = CHUNK_BYTES // work.dtype.itemsize, work.w.strides
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
