"""Dense wgrad on Hopper by TMA and wgmma (hopper_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_args import (
    WeightSumArgs,
    arguments,
    beside,
    dims_of,
    fill_result,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_cuts import Cut, cuts
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_model import (
    TF32,
    expected_s,
    launch_s,
    lines,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_tiles import (
    PIXELS,
    ROWS,
    TF32_TILES,
    TILES,
    TILES_OF,
    WeightTile,
)
from convgrad_service.backends.cuda.kernels.core.limits import IN_16_BITS, Requirements
from convgrad_service.backends.cuda.kernels.core.memory_time import with_memory_s
from convgrad_service.backends.cuda.kernels.core.tensor_maps import Im2colMap, TensorMap, pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    Prepared,
    every_channel,
    overlapping,
    prepare_side,
    why_not_contiguous_groups,
)
from convgrad_service.backends.cuda.kernels.layout.planes import ROW_BYTES, PixelRows, image_rows
from convgrad_service.backends.cuda.tuning.correction import fastest
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import (
    ZEROS,
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork, Operand
from convgrad_service.problems.sizes import Size3

__all__ = ["HopperWeight", "im2col_maps", "reachable", "why_not_im2col"]

# Dtypes of the operands and of the result.
RESULTS = (
    *((dtype, dtype) for dtype in (*IN_16_BITS, DType.FLOAT32)),
    *((dtype, DType.FLOAT32) for dtype in IN_16_BITS),
)
# A k-tile may extend past the last pixel.
MAX_PIXELS, MAX_GRID_Y, MOST_STEP, LEAST_CHANNELS = 2**31 - 2**16, 65535, 8, 16
# The largest im2col offset of a window's pixel, by the number of spatial dimensions.
MOST_SHIFT = {1: 65535, 2: 255, 3: 31}
# hopper_weight_sum.cu: threads, vectors per thread, the most slices of a block, and the threads
# that saturate an H200.
SUM_BLOCK, SUM_EACH, MOST_SLICES, SUM_THREADS = 256, 4, 8, 132 * 1024

NEEDS = Requirements(tf32=True, hopper=True, grouped=None)


class HopperWeight:
    """bwd_weight on sm_90a, of 16-bit tensors, and of float32 as TF32."""

    name = "hopper_weight"

    def __init__(self, least_channels: int = LEAST_CHANNELS, *, cut: Cut | None = None) -> None:
        """Create the family.

        Parameters
        ----------
        least_channels
            The fewest channels on either side.
        cut
            Overrides the chosen partition.
        """
        self._cut = cut
        self._least_channels = least_channels

    def why_not(
        self,
        work: ConvWork,
        device: CudaDevice,
        rows: PixelRows | None = None,
        parts: int = 1,
    ) -> str | None:
        """See `Family.why_not`. The answer depends on channels, kernel and limits of TMA.

        ``rows`` are copies of the operands, to read instead. Or each operand is so many ``parts``,
        one after another.
        """
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if min(work.in_channels, work.out_channels) < self._least_channels:
            return (
                f"{work.in_channels} channels to {work.out_channels} would leave most of a tile; "
                f"expected {self._least_channels} on either side"
            )
        if (reason := why_not_contiguous_groups(work)) is not None:
            return reason
        if parts > 1 and work.groups > 1 and any(channels % 8 for channels in work.channels):
            return f"groups of {work.channels} channels: parts of them are no whole 16 bytes"
        rows = _rows(work, rows, parts)
        if rows is None and (reason := why_not_im2col(work)) is not None:
            return reason
        if _best(work, device, rows, parts) is None:
            return "no partition has indices and tensor maps that the kernel and TMA accept"
        return None

    def launches(
        self,
        work: ConvWork,
        device: CudaDevice,
        cut: Cut | None = None,
        rows: PixelRows | None = None,
        parts: int = 1,
        unscale: str | None = None,
    ) -> Fragment:
        """See `Family.launches`. ``cut`` overrides the chosen partition. ``rows`` and ``parts`` are
        as in `why_not`; ``unscale`` is that of `FloatParts`."""
        cut, rows = cut or self._cut, _rows(work, rows, parts)
        if cut is not None:
            time_s = launch_s(expected_s(cut, device))
        elif (best := _best(work, device, rows, parts)) is not None:
            time_s, cut = best
        else:
            raise ValueError("a convolution that why_not refuses")
        if work.dtype is DType.FLOAT32 and rows is None:
            time_s = with_memory_s(work, time_s, launch_s(TF32.launch_s))
        x, y = (
            Prepared(operand) if rows or parts > 1 else prepare_side(work, name, device)
            for operand, name in (
                (rows.x.operand if rows else work.x, "input"),
                (rows.y.operand if rows else work.y, "grad_output"),
            )
        )
        steps: list[Step] = [*overlapping((*x.steps, *y.steps), device)]
        workspace = [*x.workspace, *y.workspace]
        maps = _maps(work, cut, rows, x.operand, y.operand)
        partials = f"{work.prefix}partials" if cut.parted else None
        steps.append(
            Launch(
                cut.tile.instance(
                    work.dtype, cut.cluster, summing=cut.summing, planes=rows is not None
                ),
                (cut.blocks(device), 1, 1),
                (cut.tile.threads, 1, 1),
                pack_maps(
                    arguments(work, cut, device, rows, x.operand, y.operand),
                    {
                        f"{name}{part}": (operand, _of_part(one, operand, work.batch, part))
                        for name, operand, one in zip(
                            ("x_map", "y_map"), (x.operand, y.operand), maps, strict=True
                        )
                        for part in range(parts)
                    },
                    w=work.w,
                    accumulate=work.accumulate,
                    partials=partials,
                    unscale=unscale,
                    met=ZEROS if cut.together else None,
                ),
                cut.shared_bytes(device),
                overlaps=bool(steps),
            )
        )
        if partials is not None:
            workspace.append(Workspace(partials, cut.partial_bytes))
            if not cut.together:
                steps.append(_sum(work, cut, partials))
        return Fragment(
            f"{self.name}_{cut.name}{'_planes' if rows else ''}",
            tuple(steps),
            tuple(workspace),
            expected_s=time_s + x.expected_s + y.expected_s,
        )

    def tuned(self, config: str, work: ConvWork, device: CudaDevice) -> HopperWeight | None:
        found = next((cut for cut in reachable(work, device) if str(cut) == config), None)
        return None if found is None else HopperWeight(cut=found)

    def instances(self) -> Iterable[Instance]:
        found = [
            *(instance for dtype in IN_16_BITS for instance in _instances(dtype, TILES)),
            *_instances(DType.FLOAT32, TF32_TILES),
        ]
        found += [
            tile.instance(dtype, cluster, summing=summing, planes=True)
            for dtype in (*IN_16_BITS, DType.FLOAT32)
            for tile in TILES
            for cluster, summing in tile.clusters
            if cluster == summing
        ]
        return found + [_sum_instance(dtype, result) for dtype, result in RESULTS]

    def parts_instances(self) -> Iterable[Instance]:
        """Return the instances for operands in several parts."""
        tiles = [tile for of in TILES_OF.values() for tile in of if tile.parts > 1]
        found = _instances(DType.BFLOAT16, tiles)
        return [_sum_instance(DType.BFLOAT16, DType.FLOAT32), *found]


def _instances(dtype: DType, tiles: Iterable[WeightTile]) -> list[Instance]:
    return [
        tile.instance(dtype, cluster, summing=summing)
        for tile in tiles
        for cluster, summing in tile.clusters
    ]


def why_not_im2col(work: ConvWork) -> str | None:
    """Return why the copy engine cannot read the pixels of windows, or None."""
    dims = dims_of(work)
    for dim in range(3 - dims, 3):
        shift = (work.kernel[dim] - 1) * work.dilation[dim]
        if shift > MOST_SHIFT[dims]:
            return f"taps reach over {shift} pixels; expected at most {MOST_SHIFT[dims]}"
    if max(work.stride) > MOST_STEP:
        return f"a stride of {max(work.stride)}; expected at most {MOST_STEP}"
    if work.pixels > MAX_PIXELS:
        return f"{work.pixels} pixels; expected at most {MAX_PIXELS}"
    return None


def _rows(work: ConvWork, rows: PixelRows | None, parts: int) -> PixelRows | None:
    return image_rows(work) if rows is None and parts == 1 else rows


@lru_cache(maxsize=16)
def _best(
    work: ConvWork, device: CudaDevice, rows: PixelRows | None, parts: int
) -> tuple[float, Cut] | None:
    """Return the fastest partition and its expected seconds. Cached, as each plan needs it twice
    and the search is slow."""
    every = [
        (launch_s(expected_s(cut, device)), cut) for cut in reachable(work, device, rows, parts)
    ]
    if not every:
        return None
    return fastest(
        "hopper_weight",
        every,
        lambda found: lines(work, device, found),
        device,
        corrected=work.dtype.itemsize == 2 and parts == 1 and work.groups == 1,
    )


def reachable(
    work: ConvWork, device: CudaDevice, rows: PixelRows | None = None, parts: int = 1
) -> Iterator[Cut]:
    """Yield the partitions whose indices fit and whose tensor maps TMA accepts."""
    count = 2 if work.result_dtype is DType.FLOAT32 else 8
    direct = work.epilogue_free and beside(work, count)
    rows = _rows(work, rows, parts)
    taken: dict[tuple[int, int, int], bool] = {}  # by the fields that maps depend on
    for cut in cuts(work, device, direct=direct, rows=rows, parts=parts):
        pixels = cut.steps * (cut.tile.pixels if rows is None else rows.step_pixels)
        if pixels > MAX_PIXELS or cut.parted > MAX_GRID_Y:
            continue
        read = cut.tile.channels, cut.box_pixels, cut.halo
        if read not in taken:
            taken[read] = all(one.why_not() is None for one in _maps(work, cut, rows))
        if taken[read]:
            yield cut


def _maps(
    work: ConvWork,
    cut: Cut,
    rows: PixelRows | None,
    x: Operand | None = None,
    y: Operand | None = None,
) -> tuple[TensorMap, TensorMap]:
    """Return the tensor maps of the input and of grad_output: of ``rows``, or as `im2col_maps`."""
    if rows is not None:
        return rows.x.map(cut.tile.channels), rows.y.map(ROWS)
    return im2col_maps(work, cut.tile.channels, cut.halo, x, y, cut.tile.pixels)


def _of_part(tensor_map: TensorMap, operand: Operand, batch: int, part: int) -> TensorMap:
    """Return the map of a part of an operand, which follows the parts before it."""
    start = part * batch * operand.strides[0] * operand.dtype.itemsize
    return replace(tensor_map, offset_bytes=start)


def _sum(work: ConvWork, cut: Cut, partials: str) -> Launch:
    """Return the launch that reduces the partial sums and applies the epilogue."""
    args = WeightSumArgs()
    fill_result(args, work, cut)
    vectors = cut.tile.sums // 4
    threads = vectors * cut.parted // SUM_EACH
    # A block must not cross a box, which has 16 vectors per channel.
    args.slices = max(1, SUM_BLOCK * SUM_EACH // (16 * cut.tile.channels))
    while args.slices < min(MOST_SLICES, cut.shares) and threads * args.slices < SUM_THREADS:
        args.slices *= 2
    each = SUM_BLOCK // args.slices * SUM_EACH
    return Launch(
        _sum_instance(work.dtype, work.result_dtype),
        (vectors // each, cut.parted, 1),
        (SUM_BLOCK, 1, 1),
        pack(args, w=work.w, accumulate=work.accumulate, partials=partials),
        overlaps=True,
    )


def _sum_instance(dtype: DType, result: DType) -> Instance:
    return Instance.of("conv/hopper_weight_sum.cu", HOPPER, ELEMENT=dtype, RESULT=result)


def im2col_maps(
    work: ConvWork,
    channels: int,
    beyond: int,
    x: Operand | None = None,
    y: Operand | None = None,
    pixels: int = PIXELS,
) -> tuple[Im2colMap, Im2colMap]:
    """Return the tensor maps of the input and of grad_output, in boxes of so many ``pixels``.

    That of the input, in boxes of so many ``channels``, covers every pixel that is the corner of a
    window; that of grad_output covers every pixel, with so many zeros ``beyond`` each row. Without
    operands, contiguous ones are assumed.
    """
    halo = 0, 0, beyond
    upper = tuple(
        (out - 1) * stride - pad - (size - 1) + more
        for out, stride, pad, size, more in zip(
            work.output, work.stride, work.pad, work.input, halo, strict=True
        )
    )
    lower = tuple(-pad for pad in work.pad)
    every_x, every_y = (
        every_channel(one, work.groups, channels) if one else work.groups * channels
        for one, channels in ((x, work.in_channels), (y, work.out_channels))
    )
    of_x = x, every_x, work.input, lower, upper, work.stride
    of_y = y, every_y, work.output, (0, 0, 0), halo, (1, 1, 1)
    y_channels = min(ROWS, ROW_BYTES // work.dtype.itemsize)
    return (_map(work, *of_x, channels, pixels + beyond), _map(work, *of_y, y_channels, pixels))


def _map(
    work: ConvWork,
    operand: Operand | None,
    channels: int,
    size: Size3,
    lower: tuple[int, ...],
    upper: tuple[int, ...],
    step: Size3,
    box_channels: int,
    pixels: int,
) -> Im2colMap:
    itemsize = work.dtype.itemsize
    spatial = range(2, 2 - dims_of(work), -1)
    sizes = (channels, *(size[dim] for dim in spatial), work.batch)
    whole = ceil_div(channels, 8) * 8
    strides = tuple(whole * prod(sizes[1:axis]) for axis in range(1, len(sizes)))
    if operand is not None:
        given = (*(operand.strides[3 + dim] for dim in spatial), operand.strides[0])
        # The stride of a dimension of one position is arbitrary, but TMA requires multiples of
        # 16.
        strides = tuple(
            theirs if extent > 1 else ours
            for theirs, ours, extent in zip(given, strides, sizes[1:], strict=True)
        )
    return Im2colMap(
        work.dtype,
        sizes,
        tuple(stride * itemsize for stride in strides),
        swizzle=box_channels * itemsize,
        steps=(1, *(step[dim] for dim in spatial), 1),
        lower=tuple(lower[dim] for dim in spatial),
        upper=tuple(upper[dim] for dim in spatial),
        channels=box_channels,
        pixels=pixels,
        round_to_tf32=work.dtype is DType.FLOAT32,
    )
