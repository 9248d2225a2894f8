"""Dense wgrad on tensor cores by mma.sync (dense_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import (
    DTYPES,
    LAUNCH_S,
    MAX_INDEX,
    DenseFamily,
    DenseTile,
    last_offset,
    uses_3xtf32,
    why_not_few_terms,
)
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.core.limits import (
    MAX_GRID_YZ,
    MAX_PIXELS,
    why_not_dense,
)
from convgrad_service.backends.cuda.kernels.core.split_sum import (
    channel_last,
    split_sum,
    split_sum_instances,
)
from convgrad_service.backends.cuda.kernels.fallback.weight_args import fill_wgrad
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES, prepare_side
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import (
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides

__all__ = ["DenseWeight"]

SPAN_BYTES = 32
# flat_sum.cu: results per thread, threads per block, the most slices of a block, and the fewest
# splits that use them.
SUM_RESULTS, SUM_BLOCK, SUM_SLICES, MANY_SPLITS = 4, 256, 8, 16


DenseWeightArgs = structure("conv/dense_weight.cu", "DenseWeightArgs")


FlatSumArgs = structure("core/flat_sum.cu", "FlatSumArgs")


class DenseWeight(DenseFamily):
    """bwd_weight whose groups fill tensor-core tiles.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and float32 as three TF32 products.
    """

    name = "dense_weight"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. As in `DenseGather`, splitting the problem does not change the
        answer."""
        if (reason := why_not_dense(work, device)) is not None:
            return reason
        if not self._fills_tile(work, work.out_channels * work.in_channels * work.taps):
            return (
                f"{work.out_channels} channels x {work.in_channels} channels of {work.taps} taps a "
                "group would leave most of a tile"
            )
        if (reason := why_not_few_terms(work)) is not None:
            return reason
        if max(work.pixels, work.taps * (work.in_channels + 16)) > MAX_PIXELS:
            return f"the pixels, or the taps x channels, are more than {MAX_PIXELS}"
        if all(_fitting(work, device, int64) for int64 in (False, True)):
            return None
        x, y = (prepare_side(work, name, device) for name in ("input", "grad_output"))
        if not _fitting(work, device, _needs_int64(work, x.operand, y.operand)):
            return f"the offsets of {work.taps} taps do not fit into shared memory"
        return None

    def launches(
        self,
        work: ConvWork,
        device: CudaDevice,
        tile: DenseTile | None = None,
        splits: int | None = None,
    ) -> Fragment:
        """See `Family.launches`. ``tile`` and ``splits`` override the chosen ones."""
        return _fragment(work, device, tile, splits)

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> DenseWeight | None:
        """See `Tunable.tuned`. There is one configuration."""
        return self if not config else None

    def instances(self) -> Iterable[Instance]:
        return [
            *(
                _instance(tile, dtype, int64)
                for dtype, split in (*((dtype, False) for dtype in DTYPES), (DType.FLOAT32, True))
                for int64 in (False, True)
                for tile in _tiles_of(dtype, split, int64)
            ),
            *map(_sum_instance, DTYPES),
            *split_sum_instances(),
        ]


@lru_cache(maxsize=16)
def _fragment(
    work: ConvWork, device: CudaDevice, tile: DenseTile | None, splits: int | None
) -> Fragment:
    """Return the launches. Cached, as several choices of one plan compare this family."""
    x, y = (prepare_side(work, name, device) for name in ("input", "grad_output"))
    int64 = _needs_int64(work, x.operand, y.operand)
    expected, best_tile, best_splits = _expected(work, device, int64)
    tile, splits = tile or best_tile, splits or best_splits
    partials = f"{work.prefix}partials"

    args = DenseWeightArgs()
    fill_wgrad(args, work, x.operand, y.operand)
    args.splits = splits
    args.plain = work.epilogue_free and _in_order(work)
    args.wide_result = work.result_dtype is DType.FLOAT32
    steps: list[Step] = [*x.steps, *y.steps]
    steps.append(
        Launch(
            _instance(tile, work.dtype, int64),
            (_tiles(work, tile), work.groups, splits),
            (tile.threads, 1, 1),
            pack(
                args,
                x=x.operand,
                y=y.operand,
                w=work.w,
                accumulate=work.accumulate,
                partials=partials if splits > 1 else None,
            ),
            _shared_bytes(work, tile, int64),
        )
    )
    workspace = [*x.workspace, *y.workspace]
    if splits > 1:
        workspace.append(Workspace(partials, splits * _partial_bytes(work)))
        steps.append(_sum(work, partials, splits))
    return Fragment(
        f"{DenseWeight.name}_{tile.m}x{tile.n}/{splits}",
        tuple(steps),
        tuple(workspace),
        expected_s=expected,
    )


def _sum(work: ConvWork, partials: str, splits: int) -> Launch:
    """Return the launch that reduces the partial sums and applies the epilogue."""
    results = work.groups * work.out_channels * work.taps * work.in_channels
    accumulate = work.accumulate
    if _in_order(work) and results % SUM_RESULTS == 0:
        slices = SUM_SLICES if splits >= MANY_SPLITS else 1
        args = FlatSumArgs(results=results, splits=splits, slices=slices)
        args.alpha, args.beta = work.alpha, work.beta
        return Launch(
            _sum_instance(work.result_dtype),
            linear_grid(results // SUM_RESULTS, SUM_BLOCK // slices),
            (SUM_BLOCK, 1, 1),
            pack(args, partials=partials, result=work.w, accumulate=accumulate),
        )
    return split_sum(
        partials,
        splits,
        (work.groups, work.out_channels, *work.kernel, work.in_channels),
        channel_last(work.w),
        DType.FLOAT32,
        accumulate=None if accumulate is None else channel_last(accumulate),
        alpha=work.alpha,
        beta=work.beta,
    )


def _sum_instance(dtype: DType) -> Instance:
    return Instance.of("core/flat_sum.cu", RESULT=dtype)


# Only the last tile has registers left for 64-bit offsets.
TILES = (
    DenseTile(128, 128, 64, 64, 128, 3, 2, flops=400e12, start_s=1e-6),
    DenseTile(128, 256, 64, 64, 128, 3, 1, flops=450e12, start_s=2e-6),
    DenseTile(256, 128, 64, 64, 128, 3, 1, flops=430e12, start_s=1e-6),
    DenseTile(64, 256, 64, 64, 64, 4, 2, flops=380e12, start_s=9.5e-6),
    DenseTile(64, 64, 32, 32, 128, 4, 3, flops=250e12, start_s=5e-6),
    DenseTile(32, 128, 32, 32, 128, 4, 3, flops=250e12, start_s=4e-6),
    DenseTile(128, 128, 64, 64, 64, 4, 2, flops=400e12, start_s=6.5e-6),
)
TILES_3XTF32 = (
    DenseTile(128, 128, 32, 64, 128, 3, 1, flops=115e12, start_s=0.9e-6, tf32x3=True),
    DenseTile(64, 64, 32, 32, 128, 3, 2, flops=99e12, start_s=0.3e-6, tf32x3=True),
    DenseTile(32, 128, 32, 32, 128, 3, 2, flops=90e12, start_s=0.9e-6, tf32x3=True),
    DenseTile(128, 64, 32, 64, 128, 3, 2, flops=115e12, start_s=0.8e-6, tf32x3=True),
)
# The fewest k-tiles of a split, and the most bytes of partial sums, unless the caller asks for
# more.
LEAST_STEPS = 4
PARTIAL_BYTES = 256 * 2**20
MOST_WAVES = 3
COPY_BYTES_PER_S = 3e12
# Seconds for a thread to locate one pixel at one more tap, fitted to a first layer with 49 taps x 8
# channels.
ADDRESSING_S = 0.14e-6


def _tiles_of(dtype: DType, split: bool, int64: bool) -> Sequence[DenseTile]:
    """Return the tiles that fit into registers, with 64-bit offsets if ``int64``."""
    tiles = TILES_3XTF32 if split else TILES
    if int64:
        return tiles[-1:]
    return [tile for tile in tiles if dtype is not DType.FLOAT32 or tile != TILES[0]]


def _expected(work: ConvWork, device: CudaDevice, int64: bool) -> tuple[float, DenseTile, int]:
    """Return the least expected time in seconds, its tile and its number of splits.

    They depend on the problem and the device model only, so equal requests give equal bits.
    """
    results = work.groups * work.out_channels * work.in_channels * work.taps
    channels = _columns(work) // work.taps
    options = []
    for tile, shared in _fitting(work, device, int64).items():
        pixels = work.pixels
        if channels % tile.n == 0:
            # A tile has a single tap, which skips pixels whose input is padding.
            pixels = ceil_div(pixels * work.conv.valid_flops, work.conv.flops)
        all_steps = ceil_div(pixels, tile.depth(work.dtype))
        tiles = _tiles(work, tile) * work.groups
        slots = device.multiprocessors * tile.blocks
        addresses = (_tile_taps(work, tile) - 1) * tile.depth(work.dtype) / tile.threads
        addressing_s = addresses * ADDRESSING_S
        if work.split_k is None:
            most = min(all_steps // LEAST_STEPS, PARTIAL_BYTES // (4 * results), MAX_GRID_YZ)
            wanted = (slots * halves // (2 * tiles) for halves in range(1, 2 * MOST_WAVES + 1))
            counts = {max(1, min(count, most)) for count in wanted}
        else:
            counts = {min(work.split_k, work.pixels, MAX_GRID_YZ)}
        for count in sorted(counts):
            steps = ceil_div(all_steps, count)
            expected = tile.expected_s(device, tiles * count, steps, shared, addressing_s)
            if count > 1:
                expected += LAUNCH_S + results * 4 * (2 * count + 1) / COPY_BYTES_PER_S
            options.append((expected, tile, count))
    return min(options, key=lambda option: option[0])


def _fitting(work: ConvWork, device: CudaDevice, int64: bool) -> dict[DenseTile, int]:
    """Return the tiles that fit, and the bytes of shared memory of each."""
    needed = {
        tile: _shared_bytes(work, tile, int64)
        for tile in _tiles_of(work.dtype, uses_3xtf32(work), int64)
    }
    return {tile: shared for tile, shared in needed.items() if tile.fits(device, shared)}


def _needs_int64(work: ConvWork, x: Operand, y: Operand) -> bool:
    """Return whether offsets in an operand exceed 32 bits."""
    sides = (x, work.in_channels, work.input), (y, work.out_channels, work.output)
    return any(
        last_offset(operand, (work.batch, work.groups, channels, *size)) > MAX_INDEX
        for operand, channels, size in sides
    )


def _instance(tile: DenseTile, dtype: DType, int64: bool) -> Instance:
    return Instance.of("conv/dense_weight.cu", **tile.defines(dtype, int64))


def _columns(work: ConvWork) -> int:
    chunk = CHUNK_BYTES // work.dtype.itemsize
    return work.taps * ceil_div(work.in_channels, chunk) * chunk


def _tiles(work: ConvWork, tile: DenseTile) -> int:
    """Return the number of tiles per group and split."""
    return ceil_div(work.out_channels, tile.m) * ceil_div(_columns(work), tile.n)


def _tile_taps(work: ConvWork, tile: DenseTile) -> int:
    """Return the most taps that the columns of one tile span."""
    channels = _columns(work) // work.taps
    if channels % tile.n == 0:
        return 1
    return min(work.taps, (tile.n - 2) // channels + 2)


def _shared_bytes(work: ConvWork, tile: DenseTile, int64: bool) -> int:
    """Return the bytes of shared memory: the pipeline, a shift per tap of the tile, and per pixel
    its offset in y and, for each tap, in x."""
    taps = _tile_taps(work, tile)
    shift, offset = (32, 8) if int64 else (16, 4)
    depth = tile.depth(work.dtype)
    around = max(1, tile.threads // depth)
    batch = ceil_div(tile.stages - 1, around) * around
    offsets = (1 + taps) * 2 * batch * depth
    return (
        tile.pipeline_bytes + SPAN_BYTES + taps * shift + offsets * offset + tile.scaling_flag_bytes
    )


def _partial_bytes(work: ConvWork) -> int:
    elements = work.groups * work.out_channels * work.in_channels * prod(work.kernel)
    return elements * DType.FLOAT32.itemsize


def _in_order(work: ConvWork) -> bool:
    """Return whether the result is contiguous as (G, K, T, R, S, C), like the partial sums."""
    shape = (work.groups, work.out_channels, *work.kernel, work.in_channels)
    strides = zip(shape, channel_last(work.w).strides, contiguous_strides(shape), strict=True)
    return all(stride == wanted for extent, stride, wanted in strides if extent > 1)
