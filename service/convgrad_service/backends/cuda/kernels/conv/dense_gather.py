"""Dense fprop and dgrad on tensor cores by mma.sync (dense_gather.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill_axes, pack
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import (
    DTYPES,
    MAX_INDEX,
    DenseFamily,
    DenseTile,
    last_offset,
    uses_3xtf32,
    why_not_few_terms,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import (
    MAX_PHASES,
    Axes,
    divider,
    gather_axes,
    may_skip_taps,
)
from convgrad_service.backends.cuda.kernels.core.limits import MAX_PIXELS, why_not_dense
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    in_whole_chunks,
    prepare_side,
    prepare_weight,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["DenseGather"]

MAX_TAPS = 1024


PhaseArgs = structure("conv/dense_gather.cu", "Phase")


DenseGatherArgs = structure("conv/dense_gather.cu", "DenseGatherArgs")


class DenseGather(DenseFamily):
    """fwd and bwd_data whose groups fill tensor-core tiles.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and float32 as three TF32 products.
    """

    name = "dense_gather"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`.

        The answer depends on channels, kernel, stride and dilation, so that every part of a split
        problem gets the same kernel. Sizes matter only if they overflow a kernel's indices.
        """
        if (reason := why_not_dense(work, device)) is not None:
            return reason
        read, written = work.channels
        if not self._fills_tile(work, read * written):
            return f"{read} to {written} channels per group would leave most of a tile"
        if (reason := why_not_few_terms(work)) is not None:
            return reason
        if work.direction == "bwd_data" and max(work.stride) > MAX_PHASES:
            return f"stride {max(work.stride)} makes more than {MAX_PHASES} phases"
        if work.taps > MAX_TAPS:
            return f"{work.taps} taps are more than {MAX_TAPS}"
        if work.batch * max(prod(work.input), prod(work.output)) > MAX_PIXELS:
            return f"the pixels are more than {MAX_PIXELS}"
        return None

    def launches(
        self, work: ConvWork, device: CudaDevice, tile: DenseTile | None = None
    ) -> Fragment:
        """See `Family.launches`. ``tile`` overrides the chosen tile."""
        return _fragment(work, device, tile)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(tile, dtype, backward, int64)
            for dtype, tiles in (
                *((dtype, TILES) for dtype in DTYPES),
                (DType.FLOAT32, TILES_3XTF32),
            )
            for backward in (False, True)
            for tile, int64 in (*((tile, False) for tile in tiles), (tiles[-1], True))
        ]


@lru_cache(maxsize=16)
def _fragment(work: ConvWork, device: CudaDevice, tile: DenseTile | None) -> Fragment:
    """Return the launches by a tile, or the chosen one. Cached, as several choices of one plan
    compare this family."""
    backward = work.direction == "bwd_data"
    result = work.result
    read, written = work.channels
    axes = gather_axes(work)
    x = prepare_side(work, "source", device)
    w = prepare_weight(work, device)
    # The kernel also computes offsets of positions outside the source.
    source_shape = (work.batch, work.groups, read, *(axis.x_size for axis in axes))
    weight_shape = (work.groups, work.out_channels, work.in_channels, *work.kernel)
    int64 = (
        max(
            last_offset(x.operand, source_shape) + _margin(x.operand, axes),
            last_offset(w.operand, weight_shape),
        )
        > MAX_INDEX
    )
    if tile is None:
        tile = gather_tile(work, axes, device, int64)

    args = DenseGatherArgs()
    args.x_stride[:], args.y_stride[:] = x.operand.strides, result.strides
    group, k, c, *kernel = w.operand.strides
    args.w_stride[:] = (group, c, k, *kernel) if backward else (group, k, c, *kernel)
    args.alpha, args.beta = work.alpha, work.beta
    args.batch, args.in_channels, args.out_channels = work.batch, read, written
    args.activation = ACTIVATIONS[work.activation]
    size = work.sizes[1]
    extents = (work.batch, work.groups, written, *size)
    args.wide_stores = in_whole_chunks(result, extents, 2)
    args.runs_of_pixels = _runs_of_pixels(result, axes, size)
    args.plain = work.epilogue_free
    args.may_skip_taps = may_skip_taps(axes, tile.m)
    fill_axes(args, axes, "x_size", "x_step", "x_tap", "y_step", "r_step")
    for dim, axis in enumerate(axes):
        args.phases[dim] = len(axis.phases)
        for place, phase in enumerate(axis.phases):
            args.phase[dim][place] = PhaseArgs(
                phase.taps, phase.r0, phase.x0, phase.y0, phase.count, *divider(phase.count)
            )
    instance = _instance(tile, work.dtype, backward, int64)
    channel_tiles = ceil_div(written, tile.n)
    launch = Launch(
        instance,
        (
            channel_tiles * ceil_div(_most_pixels(work, axes), tile.m),
            work.groups,
            prod(len(axis.phases) for axis in axes),
        ),
        (tile.threads, 1, 1),
        pack(args, x=x.operand, w=w.operand, y=result, accumulate=work.accumulate, bias=work.bias),
        shared_bytes(tile, axes, int64),
    )
    return Fragment(
        f"{DenseGather.name}_{work.direction}_{tile.m}x{tile.n}",
        (*x.steps, *w.steps, launch),
        (*x.workspace, *w.workspace),
        expected_s=expected_s(work, axes, device, int64, tile),
    )


# Only the last tile has registers left for 64-bit offsets.
TILES = (
    DenseTile(128, 128, 64, 64, 128, 3, 2, flops=504e12, start_s=4.6e-6),
    DenseTile(64, 128, 32, 64, 128, 3, 3, flops=433e12, start_s=4.0e-6),
    DenseTile(256, 64, 64, 64, 64, 4, 2, copy_groups=2, flops=428e12, start_s=5.6e-6),
    DenseTile(64, 64, 32, 32, 128, 4, 3, flops=361e12, start_s=3.5e-6),
    DenseTile(256, 32, 64, 32, 64, 4, 2, flops=305e12, start_s=4.5e-6),
    DenseTile(128, 128, 64, 64, 64, 4, 2, flops=460e12, start_s=4.7e-6),
)
# All have the same depth of partial accumulation, and so give bitwise equal results.
TILES_3XTF32 = (
    DenseTile(128, 128, 32, 64, 128, 3, 1, flops=141e12, start_s=4.2e-6, tf32x3=True),
    DenseTile(64, 64, 32, 32, 128, 3, 2, flops=123e12, start_s=4.0e-6, tf32x3=True),
    DenseTile(128, 32, 32, 32, 128, 3, 2, flops=117e12, start_s=4.1e-6, tf32x3=True),
    DenseTile(128, 64, 32, 64, 128, 3, 2, flops=152e12, start_s=5.8e-6, tf32x3=True),
)


def expected_s(
    work: ConvWork, axes: Axes, device: CudaDevice, int64: bool, tile: DenseTile
) -> float:
    """Return the expected time of a tile, in seconds."""
    read, written = work.channels
    phases = [
        (work.batch * prod(phase.count for phase in each), prod(phase.taps for phase in each))
        for each in product(*(axis.phases for axis in axes))
    ]

    columns = ceil_div(written, tile.n) * work.groups
    depths = ceil_div(read, tile.depth(work.dtype))
    shared, blocks, steps, longest_s = shared_bytes(tile, axes, int64), 0, 0, 0.0
    for pixels, taps in phases:
        count = ceil_div(pixels, tile.m) * columns
        blocks += count
        steps += count * taps * depths
        # Blocks of other phases may have little to do.
        longest_s = max(longest_s, tile.expected_s(device, count, taps * depths, shared))
    return max(longest_s, tile.expected_s(device, blocks, steps / blocks, shared))


def gather_tile(work: ConvWork, axes: Axes, device: CudaDevice, int64: bool) -> DenseTile:
    """Return the tile with the least expected time. Results do not depend on the tile."""
    tiles = TILES_3XTF32 if uses_3xtf32(work) else TILES
    if int64:
        return tiles[-1]
    fitting = [tile for tile in tiles if tile.fits(device, shared_bytes(tile, axes, int64))]
    return min(fitting, key=lambda tile: expected_s(work, axes, device, int64, tile))


def _instance(tile: DenseTile, dtype: DType, backward: bool, int64: bool) -> Instance:
    return Instance.of("conv/dense_gather.cu", ACROSS=backward, **tile.defines(dtype, int64))


def shared_bytes(tile: DenseTile, axes: Axes, int64: bool) -> int:
    """Return the bytes of shared memory.

    These are the pipeline or the accumulators, two offsets per pixel, three values per tap, and a
    bit mask of the taps per pixel and per tile.
    """
    tap, offset = (24, 8) if int64 else (12, 4)
    taps = prod(max(phase.taps for phase in axis.phases) for axis in axes)
    bits = ceil_div(taps, 32) * 4 * (1 + tile.m)
    room = max(tile.pipeline_bytes, tile.m * (tile.n + 9) * 4)
    return room + tile.m * (8 + offset) + taps * tap + bits + tile.scaling_flag_bytes


def _most_pixels(work: ConvWork, axes: Axes) -> int:
    """Return the number of pixels of the largest phase."""
    return work.batch * prod(max(phase.count for phase in axis.phases) for axis in axes)


def _margin(operand: Operand, axes: Axes) -> int:
    """Return a bound, in elements, on how far offsets reach outside the source on both sides."""
    return sum(
        max(
            abs(phase.x0) + phase.count * axis.x_step + abs(axis.x_tap) * phase.taps
            for phase in axis.phases
        )
        * stride
        for axis, stride in zip(axes, operand.strides[3:], strict=True)
    )


def _runs_of_pixels(result: Operand, axes: Axes, size: tuple[int, int, int]) -> bool:
    """Return whether pixels of the result are contiguous in runs of a multiple of four."""
    if result.strides[5] != 1 or axes[2].y_step != 1:
        return False
    run = 1
    for axis, stride, extent in zip(axes[::-1], result.strides[:2:-1], size[::-1], strict=True):
        if extent > 1 and (stride != run or axis.y_step != 1):
            break
        run *= extent
    return run % 4 == 0
