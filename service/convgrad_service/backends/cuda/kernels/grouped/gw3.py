"""Grouped wgrad on Hopper by TMA and wgmma (hopper_grouped_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    LatticeAxis,
    Size4,
    box_map,
    candidate_tiles,
    lattice_axis,
    why_not_copied,
)
from convgrad_service.backends.cuda.kernels.grouped.gw2 import describe_result
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["HopperGroupedWeight", "Share", "shares_of"]

STAMPED = False
DEFINES: tuple[tuple[str, str], ...] = ()
DTYPES = (DType.FLOAT16, DType.BFLOAT16)
WIDTH, PIXEL_BYTES = 32, 64
SMALL_GROUPS = (4, 8, 16)
COLUMNS = 8
MOST_TAPS, MOST_SUB_BOXES = 10, 8
WARPS, ITEMS, THREADS = 8, 4, 384
SWIZZLE_ATOM, ALIGNMENT, STATIC_BYTES = 512, 1024, 1024
STAGES = (8, 6, 5, 4, 3, 2)
MOST_SPLITS, MOST_CLUSTER = 255, 8
PARTIAL_BYTES = 64 * 2**20
PLACES, BEST = (32, 64, 128, 256, 512, 1024), 2
MOST_EXTENT = 2**24
ROW_BYTES, STEP_BYTES = 16, 8

PhaseArgs = structure("grouped/gw3.cu", "Phase")
HopperGroupedWeightArgs = structure(
    "grouped/gw3.cu", "HopperGroupedWeightArgs", anonymous=("result",)
)


@dataclass(frozen=True, slots=True)
class Share:
    """What a block computes.

    Attributes
    ----------
    tile : tuple of int
        Pixels of a box: N, D, H, W.
    level : int
        Dimensions (D, then H) of whose taps a block has one position.
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes.
    """

    tile: Size4
    level: int
    stages: int
    splits: int
    in_cluster: bool = False


class Parts:
    """The shares of a work in which blocks have the taps of one position along ``level`` dimensions."""

    def __init__(self, work: ConvWork, level: int) -> None:
        self.work, self.level = work, level
        forward = replace(work, direction="fwd")
        self.axes: list[LatticeAxis] = [lattice_axis(forward, dim) for dim in range(3)]
        self.counts = [axis.count for axis in self.axes]
        self.phases = prod(len(axis.phases) for axis in self.axes)
        self.kernel = (*(1,) * level, *work.kernel[level:])
        self.planes = prod(work.kernel[:level])
        self.taps = prod(self.kernel)
        self.pairs = ceil_div(self.taps, 2)
        channels = work.in_channels
        self.columns = 64 if channels % 64 == 0 else WIDTH
        self.merged = max(1, WIDTH // channels)
        self.slices = max(1, channels // self.columns), max(1, channels // WIDTH)
        self.grid = ceil_div(work.groups, self.merged) * prod(self.slices), self.planes
        self.y_bytes = self.columns * 2
        # Along W, boxes have every `step`-th column.
        step, tap = self.axes[2].x_step, self.axes[2].x_tap
        self.residues = [j * tap % step for j in range(self.kernel[2])]
        self.shifts = [j * tap // step for j in range(self.kernel[2])]
        self.sub_boxes = max(self.residues) + 1
        lattices = [axis.lattice for axis in self.axes]
        self.x_steps = (*lattices[:2], lattices[2] * step)
        self.y_steps = tuple(axis.axis.y_step for axis in self.axes)
        self.slab_bytes = WARPS * self.columns * (self.pairs * 16 + 4) * 4
        self.sums = ITEMS * self.columns * self.pairs * 16

    @cached_property
    def unique_bytes(self) -> int:
        """What must be read and written once."""
        work = self.work
        pixels = prod(work.input) * work.in_channels + prod(work.output) * work.out_channels
        weights = work.taps * work.in_channels * work.out_channels
        return (work.batch * pixels + weights) * work.groups * work.dtype.itemsize

    def tiles(self, tile: Size4) -> Size4:
        """Return the tiles of the largest phase."""
        d, h, w = (ceil_div(count, size) for count, size in zip(self.counts, tile[1:], strict=True))
        return ceil_div(self.work.batch, tile[0]), d, h, w

    def boxes(self, tile: Size4) -> int:
        return self.phases * prod(self.tiles(tile))

    def best_tiles(self) -> list[Size4]:
        """Return the tiles that copy and multiply the least, of different sizes."""
        found: list[list[tuple[float, Size4]]] = [[] for _ in PLACES]
        every = {
            tile
            for steps in ((1, 2, COLUMNS), (1, 1, 2 * COLUMNS))
            for tile in candidate_tiles(self.work.batch, self.counts, steps)
        }
        for tile in every:
            pixels = prod(tile)
            if pixels > PLACES[-1]:
                continue
            box = Box(self, tile)
            if box.why_not() is not None:
                continue
            place = next(i for i, most in enumerate(PLACES) if pixels <= most)
            cost = 2.3 * box.pixels + box.steps * self.pairs * 24
            found[place].append((self.boxes(tile) * cost, tile))
        return [tile for each in found for _, tile in sorted(each)[:BEST]]


class Box:
    """The boxes of a tile in shared memory."""

    def __init__(self, parts: Parts, tile: Size4) -> None:
        self.parts, self.tile = parts, tile
        images, depth, height, width = tile
        eights = width // COLUMNS
        self.pairs_rows = eights % 2 == 1
        axes, kernel = parts.axes, parts.kernel
        d, h = (
            axis.extent(size, taps)
            for axis, size, taps in zip(axes[:2], tile[1:3], kernel[:2], strict=True)
        )
        # An odd number of columns, so that the next row starts in other banks.
        odd = int(self.pairs_rows)
        self.x_extent = images, d, h, width + max(parts.shifts) | odd
        self.y_extent = images, depth, height, width + odd
        x_pixels, y_pixels = prod(self.x_extent), prod(self.y_extent)
        self.pixels = parts.sub_boxes * x_pixels + y_pixels * parts.y_bytes // PIXEL_BYTES
        self.sub_bytes = aligned(x_pixels * PIXEL_BYTES, SWIZZLE_ATOM)
        self.y_at = aligned(parts.sub_boxes * self.sub_bytes, ALIGNMENT)
        self.box_bytes = parts.sub_boxes * x_pixels * PIXEL_BYTES + y_pixels * parts.y_bytes
        self.stage_bytes = self.y_at + aligned(y_pixels * parts.y_bytes, ALIGNMENT)
        # Of a box, innermost first.
        if self.pairs_rows:
            self.step_counts = eights, height // 2, depth
        else:
            self.step_counts = eights // 2, height, depth
        self.steps = prod(self.step_counts) * images

    def why_not(self) -> str | None:
        """Return why neither copies nor products are possible; None if they are."""
        if self.pairs_rows and self.tile[2] % 2:
            return "an odd number of eights of columns"
        return why_not_copied(self.x_extent, self.parts.x_steps, WIDTH) or why_not_copied(
            self.y_extent, self.parts.y_steps, WIDTH
        )

    def steps_at(self, stages: int) -> int:
        return aligned(max(stages * self.stage_bytes, self.parts.slab_bytes), 16)

    def rows_at(self, stages: int) -> int:
        return aligned(self.steps_at(stages) + self.steps * STEP_BYTES, 16)

    def received_at(self, stages: int) -> int:
        return aligned(
            self.rows_at(stages) + ITEMS * self.parts.pairs * 16 * ROW_BYTES, SWIZZLE_ATOM
        )

    def total_bytes(self, stages: int, cluster: int = 0) -> int:
        """``cluster`` is the number of its blocks, or 0."""
        quads = self.parts.columns * self.parts.pairs * 4
        turns = ceil_div(quads, WARPS // ITEMS * 32)
        received = ceil_div(turns, cluster) * cluster * WARPS * 32 * 16 if cluster else 0
        return self.received_at(stages) + received + ALIGNMENT

    def stages(self, device: CudaDevice, cluster: int = 0) -> int:
        """Return the most stages, or 0."""
        room = device.shared_bytes_per_block - STATIC_BYTES
        return next((n for n in STAGES if self.total_bytes(n, cluster) <= room), 0)


class HopperGroupedWeight:
    """bwd_weight on sm_90a in 16-bit types, channels last, with 4, 8, 16, or a multiple of 32
    channels per group on both sides, of any stride, dilation and number of dimensions."""

    name = "hopper_grouped_weight"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"{device.name} has no wgmma"
        if work.dtype not in DTYPES:
            return f"{work.dtype} is not a 16-bit type"
        if work.groups == 1:
            return "one group"
        channels = work.in_channels
        if channels != work.out_channels or (channels % WIDTH and channels not in SMALL_GROUPS):
            return f"{channels} to {work.out_channels} channels a group"
        if work.kernel[2] > MOST_TAPS:
            return f"{work.kernel[2]} taps in a row; expected at most {MOST_TAPS}"
        for side, operand in (("input", work.x), ("output", work.y)):
            if operand.strides[2] != 1 or operand.strides[1] != channels:
                return f"the {side}'s channels are not contiguous"
            if any(operand.strides[axis] * 2 % CHUNK_BYTES for axis in (0, 3, 4, 5)):
                return f"the {side}'s pixels do not start at multiples of 16 bytes"
        if work.groups * channels % 8:
            return "channels that are not whole 16 bytes"
        if max(*work.input, *work.output, work.batch) > MOST_EXTENT:
            return f"an extent is more than {MOST_EXTENT}"
        found = next(shares_of(work, device), None)
        if found is None:
            return "no boxes that the copy engine takes"
        parts = Parts(work, found[1].level)
        if parts.boxes(found[1].tile) > MAX_BLOCKS:
            return "too many boxes"
        refused = (one.why_not() for one in _maps(Box(parts, found[1].tile)))
        return next((reason for reason in refused if reason is not None), None)

    def launches(self, work: ConvWork, device: CudaDevice, share: Share | None = None) -> Fragment:
        """See `Family.launches`. ``share`` overrides the chosen share."""
        if share is None:
            _, share = min(shares_of(work, device), key=lambda one: one[0])
        parts = Parts(work, share.level)
        box, splits = Box(parts, share.tile), share.splits
        x_map, y_map = _maps(box)
        partials = f"{work.prefix}partials"
        meets = splits > 1 and not share.in_cluster
        launch = Launch(
            _instance(work.dtype, parts),
            (splits, *parts.grid),
            (THREADS, 1, 1),
            pack_maps(
                _args(box, share),
                {"x_map": (work.x, x_map), "y_map": (work.y, y_map)},
                w=work.w,
                accumulate=work.accumulate,
                partials=partials if meets else None,
                met=ZEROS if meets else None,
                **({"stamps": "stamps"} if STAMPED else {}),
            ),
            box.total_bytes(share.stages, splits if share.in_cluster else 0),
            cluster=splits if share.in_cluster else 1,
        )
        size = prod(parts.grid) * splits * parts.sums * 4
        return Fragment(
            f"{self.name}/{splits}",
            (launch,),
            (
                *((Workspace(partials, size),) if meets else ()),
                *((Workspace("stamps", 2**20),) if STAMPED else ()),
            ),
            expected_s=expected_s(box, share, device),
            order=str(share),
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _defined(dtype, pairs, columns)
            for dtype in DTYPES
            for pairs in range(1, MOST_TAPS // 2 + 1)
            for columns in (WIDTH, 64)
        ]


def shares_of(work: ConvWork, device: CudaDevice) -> Iterator[tuple[float, Share]]:
    """Yield candidates with their expected times."""
    seen = set()
    for level in range(3):
        if prod(work.kernel[level:]) > MOST_TAPS or prod(work.kernel[:level]) in seen:
            continue
        seen.add(prod(work.kernel[:level]))
        parts = Parts(work, level)
        if parts.sub_boxes > MOST_SUB_BOXES or prod(parts.grid) > MAX_BLOCKS:
            continue
        for tile in parts.best_tiles():
            box = Box(parts, tile)
            for splits in _splits(parts, parts.boxes(tile), device):
                # Clusters leave some multiprocessors without a block.
                for in_cluster in (False, True) if 1 < splits <= MOST_CLUSTER else (False,):
                    stages = box.stages(device, splits if in_cluster else 0)
                    if stages > 0:
                        share = Share(tile, level, stages, splits, in_cluster)
                        yield expected_s(box, share, device), share


def _splits(parts: Parts, boxes: int, device: CudaDevice) -> list[int]:
    """Return numbers of splits that fill the device or a part of it, unless the caller sets it."""
    work, columns = parts.work, prod(parts.grid)
    if columns > ZEROS_BYTES // 4:
        return [1]
    if work.split_k is not None:
        return [max(1, min(work.split_k, boxes, MOST_SPLITS))]
    most = min(boxes, MOST_SPLITS, max(1, PARTIAL_BYTES // (columns * parts.sums * 4)))
    found = {1: None} if boxes <= 8 else {}
    for part in (1, 2, 4, 8):
        wanted = min(most, max(1, device.multiprocessors // part // columns))
        # The fewest splits that do not increase the boxes per block.
        found[ceil_div(boxes, ceil_div(boxes, wanted))] = None
    return list(found)


def features(box: Box, share: Share, device: CudaDevice) -> dict[str, float]:
    parts, clock, splits = box.parts, 1.755e9, share.splits
    # Fewer clusters than blocks fit.
    fitting = device.multiprocessors - (12 if share.in_cluster and splits > 2 else 0)
    each = ceil_div(prod(parts.grid) * splits, fitting)
    turns = ceil_div(parts.boxes(box.tile), splits)
    sums = parts.sums * 4
    used = 1 / parts.merged
    return {
        "fixed": each * (1.6e-6 + turns * 150 / clock),
        "copy": each * turns * box.pixels * 2.6 / clock,
        "compute": each * turns * box.steps * parts.pairs * (36 if parts.columns == 64 else 26) / clock,
        "dram": parts.unique_bytes / 3.8e12,
        "slabs": each * (parts.slab_bytes / 32 + sums * used / 8) / clock,
        "meet": 0.0
        if splits == 1
        else (0.4e-6 if share.in_cluster else 1.2e-6) + each * sums * used * 2 / (25 * clock),
    }


def expected_s(box: Box, share: Share, device: CudaDevice) -> float:
    """Return the predicted time."""
    f = features(box, share, device)
    loop = (f["copy"] ** 3 + f["compute"] ** 3 + f["dram"] ** 3) ** (1 / 3)
    return 3.1e-6 + f["fixed"] + loop + f["slabs"] + f["meet"]


def _args(box: Box, share: Share) -> Any:
    parts, work = box.parts, box.parts.work
    axes, tile = parts.axes, box.tile
    args = HopperGroupedWeightArgs()
    args.boxes, args.more = divmod(parts.boxes(tile), share.splits)
    tiles = parts.tiles(tile)
    args.by_tiles[:], args.tiles[:] = [divider(count) for count in tiles[1:]], tiles
    args.tile_images = tile[0]
    args.x_next[:] = [
        size * axis.x_step * axis.lattice for size, axis in zip(tile[1:], axes, strict=True)
    ]
    args.y_next[:] = [size * step for size, step in zip(tile[1:], parts.y_steps, strict=True)]
    rows = work.kernel[1] if share.level == 2 else 1
    args.by_plane_rows, args.plane_rows = divider(rows), rows
    args.plane_next[:] = [axis.x_tap * axis.lattice for axis in axes[:2]]
    args.by_slices[:], args.slices[:] = [divider(n) for n in parts.slices], parts.slices
    args.stages = share.stages
    for name in ("stage_bytes", "y_at", "box_bytes", "sub_bytes", "steps"):
        setattr(args, name, getattr(box, name))
    args.sub_boxes, args.sub_next = parts.sub_boxes, axes[2].lattice
    phases = [
        PhaseArgs((d.x0, h.x0, w.x0), (d.y0, h.y0, w.y0))
        for d in axes[0].phases
        for h in axes[1].phases
        for w in axes[2].phases
    ]
    args.phases, args.first = len(phases), phases[0]
    args.phase[: len(phases)] = phases
    x_row, y_row = box.x_extent[3] * PIXEL_BYTES, box.y_extent[3] * parts.y_bytes
    x_plane, y_plane = box.x_extent[2] * x_row, box.y_extent[2] * y_row
    d_step, h_step = axes[0].x_step * x_plane, axes[1].x_step * x_row
    eights = 1 if box.pairs_rows else 2
    at_once = 2 if box.pairs_rows else 1
    args.x_eight, args.y_eight = COLUMNS * PIXEL_BYTES, COLUMNS * parts.y_bytes
    args.x_step[:] = (
        box.x_extent[1] * x_plane,
        d_step,
        at_once * h_step,
        eights * args.x_eight,
    )
    args.y_step[:] = (
        box.y_extent[1] * y_plane,
        y_plane,
        at_once * y_row,
        eights * args.y_eight,
    )
    if box.pairs_rows:
        args.x_eight, args.y_eight = h_step, y_row
    args.step_counts[:] = box.step_counts
    args.by_steps[:] = [divider(count) for count in box.step_counts]
    args.steps_at, args.rows_at = box.steps_at(share.stages), box.rows_at(share.stages)
    args.received_at, args.in_cluster = box.received_at(share.stages), share.in_cluster
    w_strides = work.w.strides
    taps = sorted(
        (
            parts.residues[s] * box.sub_bytes
            + parts.shifts[s] * PIXEL_BYTES
            + r * axes[1].x_tap * x_row
            + t * axes[0].x_tap * x_plane,
            t * w_strides[3] + r * w_strides[4] + s * w_strides[5],
        )
        for t in range(parts.kernel[0])
        for r in range(parts.kernel[1])
        for s in range(parts.kernel[2])
    )
    args.taps = len(taps)
    for i, (x, w) in enumerate(taps):
        args.tap[i].x, args.tap[i].w = x, w
    args.plane_w[:] = w_strides[3:5]
    channels = min(work.in_channels, WIDTH), min(work.out_channels, parts.columns)
    args.by_channels, args.groups, args.merged = divider(channels[0]), work.groups, parts.merged
    describe_result(args, work, channels, ITEMS)
    return args


def _maps(box: Box) -> tuple[TiledMap, TiledMap]:
    """Return the tensor maps of the input and of grad_output."""
    parts, work = box.parts, box.parts.work
    channels = work.groups * work.in_channels
    x = box_map(
        work.x, (work.batch, *work.input, channels), box.x_extent, parts.x_steps, PIXEL_BYTES
    )
    y = box_map(
        work.y, (work.batch, *work.output, channels), box.y_extent, parts.y_steps, parts.y_bytes
    )
    return replace(x, swizzle=PIXEL_BYTES), replace(y, swizzle=parts.y_bytes)


def aligned(size: int, alignment: int) -> int:
    return ceil_div(size, alignment) * alignment


def _instance(dtype: DType, parts: Parts) -> Instance:
    return _defined(dtype, parts.pairs, parts.columns)


def _defined(dtype: DType, pairs: int, columns: int) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "MT": pairs,
        "NF": columns // 8,
        "WARPS": WARPS,
        **({"STAMPS": 1} if STAMPED else {}),
        **dict(DEFINES),
    }
    return Instance.of("grouped/gw3.cu", defines, HOPPER)
