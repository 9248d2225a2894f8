"""Dense fprop and dgrad on Hopper by TMA im2col and wgmma (hopper_gather.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill_axes
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import why_not_few_parts
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_maps import (
    LAUNCHED_PHASES,
    Sides,
    launched,
    lowest,
    sides_of,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_model import (
    choose_schedule,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    Schedule,
    candidates,
    finishes_rows,
    is_plain,
    may_start_with_images,
    pixels_beside,
    possible,
    skips_taps,
    stores_planes,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import (
    ROW_BYTES,
    HopperTile,
    tiles_of,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import (
    Axes,
    Combined,
    divider,
    gather_axes,
)
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES, Requirements
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TensorMap, pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    in_whole_chunks,
    why_not_contiguous_groups,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import H200, HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HopperGather"]

# With fewer channels on either side, most of a tile or k-tile would be padding. With 32 to 40 in
# bfloat16, it took 0.5 to 1.07 of dense_gather's time in 18 layers on an H200. In TF32, only plain
# results have a tile 32 channels wide: with 16 to 24 channels on one side, it takes 0.64 to 0.89 of
# the time of the faster of dense_gather and implicit_gemm (5 1x1 gradients of the input).
LEAST_CHANNELS, LEAST_CHANNELS_WIDE, FEWEST_CHANNELS = 32, 48, 16
# Of parts, which are compared by expected times with others.
LEAST_CHANNELS_OF_PARTS = 9
# The fewest products per sum with an epilogue, and with channels that are not whole chunks.
# dense_gather stores such results faster (measured on an H200).
LEAST_TERMS_FINISHED, LEAST_TERMS_APART = 512, 1152
# The most phases, by instance: the kernel parameters, of at most 4 KB, hold a tensor map for each.
MAPS = (1, LAUNCHED_PHASES)
MOST_PHASES = 4 * LAUNCHED_PHASES
# The most taps of a phase along one dimension: a bit mask holds them.
MAX_TAPS = 32
# Of an operand's row, along K of an MMA.
MMA_BYTES = 32
MAX_PIXELS = 2**31 - 2048
UNBOUNDED = 2**31 - 1
# What the launch before it that transposes a TF32 weight adds, on an H200: the median of 1x1 layers
# of less than 20 us.
TRANSPOSED_S = 2.4e-6
# Of storing planes instead of channels last, fitted on an H200 to 223 gradients of the input, 1x1.
PLANES_S = 2e-6


AxisArgs = structure("conv/hopper_gather.cuh", "GatherAxis")


NEEDS = Requirements(tf32=True, hopper=True, grouped=None)


class HopperGather:
    """fwd and bwd_data, in 16 bits or in TF32 (``precision: high``)."""

    name = "hopper_gather"

    def __init__(
        self,
        everything: bool = False,
        schedule: Schedule | None = None,
        *,
        direct: bool = False,
        parts: int = 1,
    ) -> None:
        """Create the family.

        Parameters
        ----------
        everything
            Take all work that the kernel can compute, even if another is faster.
        schedule
            Overrides the chosen schedule.
        direct
            Take only operands and results that are channels last, so that the expected time is that
            of one launch.
        parts
            The parts that operands consist of (float_parts.cu), one after another; the result is
            float32.
        """
        self._everything = everything
        self._schedule = schedule
        self._direct = direct
        self._parts = parts

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        read, written = work.channels
        if (reason := _why_not_groups(work)) is not None:
            return reason
        least_channels = _least_channels(work, compared=self._direct)
        if self._parts > 1 and not self._everything:
            least_channels = LEAST_CHANNELS_OF_PARTS
            if (reason := why_not_few_parts(work)) is not None:
                return reason
        if not self._everything and min(read, written) < least_channels:
            return f"{read} to {written} channels would leave most of a tile"
        axes = gather_axes(work)
        least = _least_terms(work, axes, written)
        if not self._everything and read * work.taps < least:
            return (
                f"sums of {read * work.taps} products take less time than storing them; "
                f"expected at least {least}"
            )
        phases = axes.phases
        if len(phases) > MOST_PHASES:
            return f"{len(phases)} phases are more than {MOST_PHASES}"
        if max(phase.taps for axis in axes for phase in axis.phases) > MAX_TAPS:
            return f"more than {MAX_TAPS} taps along one dimension"
        if work.batch * max(prod(work.input), prod(work.output)) > MAX_PIXELS:
            return f"the pixels are more than {MAX_PIXELS}"
        sides = sides_of(work, device, self._parts)
        if self._direct and (sides.steps or work.result.strides[2] != 1):
            return "operands are not channels last, in whole chunks"
        return sides.why_not(axes, tiles_of(work.dtype, self._parts)[0])

    def launches(
        self,
        work: ConvWork,
        device: CudaDevice,
        schedule: Schedule | None = None,
        *,
        unscale: str | None = None,
    ) -> Fragment:
        """See `Family.launches`. ``schedule`` overrides the chosen schedule; ``unscale`` is that
        of `FloatParts`."""
        return _fragment(work, device, schedule or self._schedule, self._parts, unscale)

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> HopperGather | None:
        axes = gather_axes(work)
        every = candidates(work, axes, device, self._parts)
        found = next((one for one in every if str(one) == config), None)
        return (
            None
            if found is None
            else HopperGather(everything=True, schedule=found, parts=self._parts)
        )

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(
                tile,
                dtype,
                across=across,
                maps=maps,
                stages=tile.stages(H200),
                planes=store == "planes",
                finished=store == "finished",
            )
            for dtype in (DTYPES if self._parts == 1 else (DType.BFLOAT16,))
            for tile in tiles_of(dtype, self._parts)
            for across in ((False, True) if dtype.itemsize == 2 else (False,))
            for store in _stores(tile, dtype)
            for maps in _maps_of(tile, dtype, store, across=across)
        ]


@lru_cache(maxsize=16)
def _fragment(
    work: ConvWork, device: CudaDevice, schedule: Schedule | None, parts: int, unscale: str | None
) -> Fragment:
    """Return the launches by a schedule, or the chosen one. Cached, as several choices of one plan
    compare this family."""
    axes, sides = gather_axes(work), sides_of(work, device, parts)
    time_s, given = None, schedule
    if schedule is None:
        time_s, schedule = choose_schedule(work, axes, device, parts)
    if stores_planes(work) or parts > 1 or not may_start_with_images(work, axes):
        schedule = replace(schedule, images_first=False)
    if given is not None and not possible(work, axes, device, schedule):
        schedule = replace(schedule, tile=tiles_of(work.dtype, parts)[0])
    tile = schedule.tile
    planes = stores_planes(work) and tile.has_planes
    steps = [
        _launch(work, axes, phases, sides, schedule, device, unscale) for phases in launched(axes)
    ]
    steps[0] = replace(steps[0], overlaps=bool(sides.steps) or work.follows)
    if time_s is None:
        time_s = expected_s(work, axes, device, schedule)
    if work.direction == "bwd_data" and not sides.across:
        time_s += TRANSPOSED_S
    return Fragment(
        f"{HopperGather.name}_{work.direction}_{schedule}{'_planes' if planes else ''}",
        (*sides.steps, *steps),
        sides.workspace,
        expected_s=time_s + sides.copy_s + PLANES_S * (planes and work.dtype.itemsize == 2),
        order=f"split {tile.split}/{tile.taps}" if tile.split > 1 else "",
    )


def _launch(
    work: ConvWork,
    axes: Axes,
    phases: Sequence[Combined],
    sides: Sides,
    schedule: Schedule,
    device: CudaDevice,
    unscale: str | None,
) -> Launch:
    """Return the launch that computes some phases."""
    tile, planes = schedule.tile, stores_planes(work) and schedule.tile.has_planes
    stages = tile.stages(device)
    finished = finishes_rows(work, axes) and tile.has_epilogue
    store = "planes" if planes else "finished" if finished and tile.has_planes else "rows"
    every = _maps_of(tile, work.dtype, store, across=sides.across)
    maps = next(each for each in every if each >= len(phases))
    read, written = work.channels
    result = sides.result
    args = structure("conv/hopper_gather.cuh", "HopperGatherArgs", MAPS=maps)()
    args.y_stride[:] = result.strides
    args.alpha, args.beta = work.alpha, work.beta
    args.in_channels, args.out_channels = read, written
    args.activation = ACTIVATIONS[work.activation]
    size = work.sizes[1]
    args.wide_stores = in_whole_chunks(result, (work.batch, work.groups, written, *size), 2)
    args.plain = (1 if work.epilogue_free else 2 * finished) if args.wide_stores else 0
    if planes:
        args.wide_stores = pixels_beside(work)
    args.images_first, args.images = schedule.images_first, work.batch
    args.dims = work.conv.ndim + 2
    args.rounds = schedule.rounds
    args.group_tiles = ceil_div(written, tile.n)
    args.by_group = divider(args.group_tiles)
    args.channel_tiles = work.groups * args.group_tiles
    args.source_group, args.weight_group = sides.x.strides[1], sides.weight_rows
    args.weight_rows = work.groups * sides.weight_rows
    args.phases = len(phases)
    fill_axes(args, axes, "x_size", "x_step", "x_tap", "y_step", "r_step")
    shares = 0
    given: dict[str, tuple[Operand | str, TensorMap]] = {
        "weight": (sides.w, sides.weight_map(tile))
    }
    for i, phase in enumerate(phases):
        here = args.phase[i]
        for dim, along in enumerate(phase):
            here.axis[dim] = AxisArgs(
                along.taps, along.r0, along.x0, along.y0, along.count, lowest(axes[dim], along)
            )
        counts = [along.count for along in reversed(phase)]
        counts[0] += tile.halo(axes[2], phase[2])
        extents = counts
        if schedule.images_first:
            # The slowest coordinate may exceed its extent; nothing is stored there.
            extents = [work.batch, *counts[:2]]
            if work.conv.ndim < 3:
                extents[work.conv.ndim] = UNBOUNDED
        here.extent[:] = extents
        here.factor[:], here.shift[:] = zip(*map(divider, extents), strict=True)
        d, h, w = (along.taps for along in phase)
        row = w if tile.taps == 1 else 1
        here.by_taps, here.by_plane, here.by_row = (
            divider(max(1, count)) for count in (d * h * row, h * row, row)
        )
        here.pixels = work.batch * prod(counts)
        here.tiles = ceil_div(here.pixels, tile.pixels)
        here.share = ceil_div(here.tiles, schedule.rounds)
        shares += here.share
        given[f"source{i}"] = (
            sides.x,
            sides.source_map(axes, phase, tile, schedule.images_first),
        )
    args.a_bytes = (tile.m + tile.halo(axes[2], phases[0][2])) * ROW_BYTES
    args.slots = shares * args.channel_tiles
    grid = (min(tile.clusters(device), args.slots * args.rounds) * tile.sharing, 1, 1)
    if tile.single:
        grid = tile.split, args.channel_tiles, shares
        args.cluster, args.owned, args.stages = tile.split, tile.owned, stages
        args.by_cluster = divider(tile.split)
        args.reduce_bytes = tile.epilogue_bytes
        args.skips = skips_taps(work, axes, tile, schedule.images_first)
    return Launch(
        _instance(
            tile,
            work.dtype,
            across=sides.across,
            maps=maps,
            stages=stages,
            planes=planes,
            finished=finished,
        ),
        grid,
        (tile.threads, 1, 1),
        pack_maps(
            args, given, y=result, accumulate=work.accumulate, bias=work.bias, unscale=unscale
        ),
        tile.shared_bytes(stages),
        cluster=tile.split,
    )


def _stores(tile: HopperTile, dtype: DType) -> tuple[str, ...]:
    """Return how instances of a tile store results."""
    if not tile.has_planes:
        return ("rows",)
    finishes = tile.has_epilogue and dtype.itemsize == 2 and tile.parts == 1
    return ("rows", "planes", "finished") if finishes else ("rows", "planes")


def _maps_of(tile: HopperTile, dtype: DType, store: str, *, across: bool) -> tuple[int, ...]:
    """Return the phases that a tile's instances compute at most. Those of several store rows.

    Where warpgroups share a tile, a single phase has the instance for several: 1.004 of the time
    on an H200 (46 layers, at most 1.04).
    """
    if tile.taps > 1 or store != "rows" or not (across or dtype is DType.FLOAT32):
        return MAPS[:1]
    return MAPS[1:] if tile.has_planes else MAPS


def _why_not_groups(work: ConvWork) -> str | None:
    """Return why tiles of single groups cannot be computed, or None. Of a group's last k-tile, only
    products of whole MMAs are omitted: others would multiply the next group's channels."""
    if work.groups == 1:
        return None
    if (reason := why_not_contiguous_groups(work)) is not None:
        return reason
    if work.w.strides[0] != work.out_channels * work.w.strides[1]:
        return "the groups of the weight are not contiguous"
    depth = MMA_BYTES // work.dtype.itemsize
    if work.channels[0] % depth:
        return f"{work.channels[0]} channels per group are not a multiple of {depth}"
    return None


def _least_channels(work: ConvWork, *, compared: bool) -> int:
    """Return the fewest channels of either side; ``compared`` by expected times with others."""
    if work.dtype is DType.FLOAT32:
        return FEWEST_CHANNELS if is_plain(work) else LEAST_CHANNELS_WIDE
    return FEWEST_CHANNELS if compared else LEAST_CHANNELS


def _least_terms(work: ConvWork, axes: Axes, written: int) -> int:
    """Return the fewest products per sum, which depends on how the result is stored."""
    result = work.result
    size = work.sizes[1]
    if stores_planes(work):
        return 0
    if not in_whole_chunks(result, (work.batch, work.groups, written, *size), 2):
        return LEAST_TERMS_APART
    if work.epilogue_free or finishes_rows(work, axes):
        return 0
    return LEAST_TERMS_FINISHED


def _instance(tile: HopperTile, dtype: DType, **how: Any) -> Instance:
    return Instance.of("conv/hopper_gather.cu", HOPPER, **tile.defines(dtype, **how))
