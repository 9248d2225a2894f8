"""The gradient of a dense convolution's weight on Hopper: TMA, and products of warpgroups."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.channels_last import (
    Prepared,
    overlapping,
    prepare_activation,
)
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.hopper_weight_tiles import (
    SPLIT_TILES,
    TILES,
    Cut,
    cuts,
    expected_s,
    plane_pixels,
)
from convgrad_service.backends.cuda.kernels.planes import flat_planes, plane_map
from convgrad_service.backends.cuda.kernels.tensor_maps import (
    MapField,
    PixelMap,
    TileMap,
    pack_maps,
)
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import (
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda_works import ConvWork, Operand, Size3

__all__ = ["HopperWeight", "reachable"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
# What is read, and what is written.
RESULTS = (
    *((dtype, dtype) for dtype in (*DTYPES, DType.FLOAT32)),
    *((dtype, DType.FLOAT32) for dtype in DTYPES),
)
LEAST_CHANNELS = 16
# Of float32: taps further apart make boxes too long, fewer channels rows too short.
NEAR, FEW_CHANNELS = 4, 32
# A step may count past the last pixel.
MAX_PIXELS, MAX_GRID_Y = 2**31 - 2**16, 65535
MOST_STEP = 8
# What a pixel may be moved by in its window, by the number of dimensions.
MOST_SHIFT = {1: 65535, 2: 255, 3: 31}
# Of hopper_weight_sum.cu: threads, vectors of each, the most slices of a block, and the threads
# that keep an H200 busy.
SUM_BLOCK, SUM_EACH, MOST_SLICES, SUM_THREADS = 256, 4, 8, 132 * 1024

# WeightResult of hopper_weight.cuh; a multiple of 8 bytes, as that is.
RESULT_FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, ctypes.c_uint64) for name in ("w", "accumulate", "partials")),
    ("w_stride", ctypes.c_int64 * 6),
    ("alpha", ctypes.c_float),
    ("beta", ctypes.c_float),
    ("in_channels", ctypes.c_int32),
    ("out_channels", ctypes.c_int32),
    ("kernel", ctypes.c_int32 * 3),
    *(
        (name, ctypes.c_int32)
        for name in (
            "shared_taps",
            "boxes",
            "row_tiles",
            "column_tiles",
            "rows_first",
            "whole",
            "shares",
            "warpgroups",
            "rows",
            "products",
            "fragments",
            "channels",
            "spread",
            "pairs",
            "wide",
        )
    ),
)


# WeightSource of hopper_weight.cuh.
SOURCE_FIELDS: tuple[tuple[str, Any], ...] = (
    ("x", ctypes.c_uint64),
    ("y", ctypes.c_uint64),
    *((f"{name}_stride", ctypes.c_int64 * 6) for name in ("x", "y")),
    ("batch", ctypes.c_int32),
    *((name, ctypes.c_int32 * 3) for name in ("x_size", "y_size", "stride", "dilation", "pad")),
)


class HopperWeightArgs(ctypes.Structure):
    """See ``hopper_weight.cu``."""

    _fields_ = (
        ("x_map", MapField),
        ("y_map", MapField),
        *RESULT_FIELDS,
        *SOURCE_FIELDS,
        *((name, ctypes.c_int32) for name in ("dims", "halo", "box_bytes", "stages")),
    )


class WeightSumArgs(ctypes.Structure):
    """See ``hopper_weight_sum.cu``."""

    _fields_ = (*RESULT_FIELDS, *SOURCE_FIELDS, ("slices", ctypes.c_int32))


class HopperWeight:
    """bwd_weight on sm_90a, of 16-bit tensors and of float32 (``precision: high``)."""

    name = "hopper_weight"

    def __init__(self, least_channels: int = LEAST_CHANNELS, *, everywhere: bool = False) -> None:
        """The fewest channels on either side; whether it takes float32 that others do faster."""
        self._least_channels = least_channels
        self._everywhere = everywhere

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`; judged by channels and kernel where not by what TMA can reach."""
        if device.architecture != "sm_90a":
            return f"{device.name} is not sm_90a"
        if work.dtype not in DTYPES and (work.dtype, work.precision) != (DType.FLOAT32, "high"):
            return f"{work.dtype} of {work.precision} precision is not for products of 16 bits"
        if work.groups > 1:
            return f"{work.groups} groups of channels"
        if min(work.in_channels, work.out_channels) < self._least_channels:
            return (
                f"{work.in_channels} channels to {work.out_channels} would leave most of a tile; "
                f"expected {self._least_channels} on either side"
            )
        planes = flat_planes(work)
        if work.dtype is DType.FLOAT32 and not (planes or self._everywhere or _shares_well(work)):
            return "float32 whose taps share few copies: dense_weight's products of TF32 are faster"
        dims = _dims(work)
        for dim in range(3 - dims, 3):
            shift = (work.kernel[dim] - 1) * work.dilation[dim]
            if shift > MOST_SHIFT[dims]:
                return f"taps reach over {shift} pixels; expected at most {MOST_SHIFT[dims]}"
        if max(work.stride) > MOST_STEP:
            return f"a stride of {max(work.stride)}; expected at most {MOST_STEP}"
        if work.pixels > MAX_PIXELS:
            return f"{work.pixels} pixels; expected at most {MAX_PIXELS}"
        if work.accumulate is not None and work.accumulate.strides != work.w.strides:
            return "accumulate does not lie as the result does"
        if next(reachable(work, device), None) is None:
            return "windows lie too far from the input's corners for TMA"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        """See `Family.launches`; ``cut`` where another than the chosen one is tried."""
        if cut is None:
            cut = min(reachable(work, device), key=lambda one: expected_s(one, device))
        planes = flat_planes(work)
        if planes is not None:
            work = planes
        x, y = (
            Prepared(operand)
            if planes
            else prepare_activation(
                operand, work.batch, 1, channels, size, f"{work.prefix}{name}_channels_last", device
            )
            for operand, channels, size, name in (
                (work.x, work.in_channels, work.input, "input"),
                (work.y, work.out_channels, work.output, "grad_output"),
            )
        )
        x_map, y_map = _plane_maps(work, cut) if planes else _maps(work, cut, x.operand, y.operand)
        args = _args(work, cut, x.operand, y.operand, device)
        if planes:
            args.halo = -work.output[2] % plane_pixels(work.dtype)
        partials = f"{work.prefix}partials" if cut.parted else None
        steps = [*overlapping((*x.steps, *y.steps), device)]
        steps.append(
            Launch(
                cut.tile.instance(
                    work.dtype, cut.cluster, sums=cut.sums, planes=planes is not None
                ),
                (cut.blocks(device), 1, 1),
                (cut.tile.threads, 1, 1),
                pack_maps(
                    args,
                    {"x_map": (x.operand, x_map), "y_map": (y.operand, y_map)},
                    x=x.operand,
                    y=y.operand,
                    w=work.w,
                    accumulate=work.accumulate,
                    partials=partials,
                ),
                cut.shared_bytes(device),
                overlaps=bool(steps),
            )
        )
        workspace = [*x.workspace, *y.workspace]
        if partials is not None:
            workspace.append(Workspace(partials, cut.partial_bytes))
            steps.append(_sum(work, cut, x.operand, y.operand, partials))
        return Fragment(
            f"{self.name}_{cut.name}{'_planes' if planes else ''}",
            tuple(steps),
            tuple(workspace),
            expected_s=expected_s(cut, device),
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            *(
                tile.instance(dtype, cluster, sums=sums)
                for dtype in DTYPES
                for tile in TILES
                for sums, clusters in ((False, (1, *tile.copying)), (True, tile.summing))
                for cluster in clusters
            ),
            *(
                tile.instance(dtype, cluster, sums=cluster > 1, planes=True)
                for dtype in (*DTYPES, DType.FLOAT32)
                for tile in TILES
                for cluster in (1, *tile.summing)
            ),
            *(tile.instance(DType.FLOAT32) for tile in SPLIT_TILES),
            *(_sum_instance(dtype, result) for dtype, result in RESULTS),
        ]


def _shares_well(work: ConvWork) -> bool:
    """Whether a box of the input, split once, serves several taps."""
    near = work.kernel[2] > 1 and work.stride[2] == 1 and work.dilation[2] <= NEAR
    return near and work.in_channels > FEW_CHANNELS


def reachable(work: ConvWork, device: CudaDevice) -> Iterator[Cut]:
    """The cuts that can be counted, and whose tensor maps the hardware takes."""
    beside = 2 if work.result_dtype is DType.FLOAT32 else 8
    direct = work.epilogue_free and _beside(work, beside)
    planes = flat_planes(work)
    for cut in cuts(planes or work, device, direct=direct, planes=planes is not None):
        countable = cut.steps * cut.tile.pixels <= MAX_PIXELS and cut.parted <= MAX_GRID_Y
        maps = _plane_maps(planes, cut) if planes else _maps(work, cut)
        if countable and all(one.why_not() is None for one in maps):
            yield cut


def _plane_maps(work: ConvWork, cut: Cut) -> tuple[TileMap, TileMap]:
    """Of the input and grad_output: planes of a box's channels."""
    x = plane_map(work.x, work.batch, work.in_channels, work.output[2], cut.tile.channels)
    return x, plane_map(work.y, work.batch, work.out_channels, work.output[2], 64)


def _beside(work: ConvWork, count: int) -> bool:
    """Whether so many channels of the result lie side by side, and aligned."""
    strides = work.w.strides
    outer = zip((strides[1], *strides[3:]), (work.out_channels, *work.kernel), strict=True)
    return (
        strides[2] == 1
        and work.in_channels % count == 0
        and all(stride % count == 0 for stride, extent in outer if extent > 1)
    )


def _fill_result(args: HopperWeightArgs | WeightSumArgs, work: ConvWork, cut: Cut) -> None:
    args.w_stride[:], args.kernel[:] = work.w.strides, work.kernel
    args.alpha, args.beta = work.alpha, work.beta
    args.in_channels, args.out_channels = work.in_channels, work.out_channels
    for name in ("shared_taps", "boxes", "row_tiles", "column_tiles"):
        setattr(args, name, getattr(cut, name))
    for name in ("rows_first", "whole", "shares"):
        setattr(args, name, getattr(cut, name))
    for name in ("warpgroups", "rows", "products", "channels", "spread"):
        setattr(args, name, getattr(cut.tile, name))
    args.fragments = cut.tile.columns // 8
    args.pairs, args.wide = _beside(work, 2), work.result_dtype is DType.FLOAT32


def _fill_source(
    args: HopperWeightArgs | WeightSumArgs, work: ConvWork, x: Operand, y: Operand
) -> None:
    args.x_stride[:], args.y_stride[:] = x.strides, y.strides
    args.batch = work.batch
    args.x_size[:], args.y_size[:] = work.input, work.output
    for name in ("stride", "dilation", "pad"):
        getattr(args, name)[:] = getattr(work, name)


def _args(work: ConvWork, cut: Cut, x: Operand, y: Operand, device: CudaDevice) -> HopperWeightArgs:
    args = HopperWeightArgs()
    _fill_result(args, work, cut)
    _fill_source(args, work, x, y)
    args.dims, args.halo, args.box_bytes = _dims(work), cut.halo, cut.box_bytes
    args.stages = cut.stages(device)
    return args


def _sum(work: ConvWork, cut: Cut, x: Operand, y: Operand, partials: str) -> Launch:
    """Adds up the partial sums and finishes them."""
    args = WeightSumArgs()
    _fill_result(args, work, cut)
    _fill_source(args, work, x, y)
    vectors = cut.tile.sums // 4
    threads = vectors * cut.parted // SUM_EACH
    # A block stays within a box, of 16 vectors a channel.
    args.slices = max(1, SUM_BLOCK * SUM_EACH // (16 * cut.tile.channels))
    while args.slices < min(MOST_SLICES, cut.shares) and threads * args.slices < SUM_THREADS:
        args.slices *= 2
    each = SUM_BLOCK // args.slices * SUM_EACH
    return Launch(
        _sum_instance(work.dtype, work.result_dtype),
        (vectors // each, cut.parted, 1),
        (SUM_BLOCK, 1, 1),
        pack(args, x=x, y=y, w=work.w, accumulate=work.accumulate, partials=partials),
        overlaps=True,
    )


def _sum_instance(dtype: DType, result: DType) -> Instance:
    defines = ("ELEMENT", CUDA_TYPES[dtype]), ("RESULT", CUDA_TYPES[result])
    return Instance("hopper_weight_sum.cu", "hopper_weight_sum", defines, HOPPER)


def _dims(work: ConvWork) -> int:
    """Spatial dimensions that there are."""
    for dim in range(2):
        if max(work.input[dim], work.output[dim], work.kernel[dim]) > 1 or work.pad[dim] != 0:
            return 3 - dim
    return 1


def _maps(
    work: ConvWork, cut: Cut, x: Operand | None = None, y: Operand | None = None
) -> tuple[PixelMap, PixelMap]:
    """Of the input, every pixel that is a window's corner; of grad_output, every pixel, and a halo
    of zeros after each row. Without operands, of ones that lie in order."""
    halo = 0, 0, cut.halo
    upper = tuple(
        (out - 1) * stride - pad - (size - 1) + more
        for out, stride, pad, size, more in zip(
            work.output, work.stride, work.pad, work.input, halo, strict=True
        )
    )
    lower = tuple(-pad for pad in work.pad)
    tile = cut.tile
    of_x = x, work.in_channels, work.input, lower, upper, work.stride
    of_y = y, work.out_channels, work.output, (0, 0, 0), halo, (1, 1, 1)
    # What is split in shared memory is not read by products as it is copied.
    swizzle = 0 if tile.split else tile.channels * tile.itemsize
    return (
        _map(work, *of_x, tile.channels, cut.box_pixels, swizzle),
        _map(work, *of_y, tile.y_channels, tile.pixels, tile.y_channels * tile.itemsize),
    )


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
    swizzle: int,
) -> PixelMap:
    itemsize = work.dtype.itemsize
    spatial = range(2, 2 - _dims(work), -1)
    sizes = (channels, *(size[dim] for dim in spatial), work.batch)
    whole = ceil_div(channels, 8) * 8
    strides = tuple(whole * prod(sizes[1:axis]) for axis in range(1, len(sizes)))
    if operand is not None:
        given = (*(operand.strides[3 + dim] for dim in spatial), operand.strides[0])
        # The stride of what there is one of may be anything; the hardware takes multiples of 16.
        strides = tuple(
            theirs if extent > 1 else ours
            for theirs, ours, extent in zip(given, strides, sizes[1:], strict=True)
        )
    return PixelMap(
        work.dtype,
        sizes,
        tuple(stride * itemsize for stride in strides),
        swizzle=swizzle,
        steps=(1, *(step[dim] for dim in spatial), 1),
        lower=tuple(lower[dim] for dim in spatial),
        upper=tuple(upper[dim] for dim in spatial),
        channels=box_channels,
        pixels=pixels,
    )
