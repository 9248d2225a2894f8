"""Two pointwise convolutions, one after the other, in one kernel, on tensor cores."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.channels_last import in_whole_chunks
from convgrad_service.backends.cuda.kernels.elements import ACTIVATIONS, CUDA_TYPES
from convgrad_service.backends.cuda.kernels.fused_shapes import (
    CHUNK,
    DTYPES,
    MAX_PIXELS,
    OTHERS,
    ROW_BYTES,
    FusedShape,
    flat_pixels,
    is_pointwise,
    wide_stores,
)
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork, FusedWork

__all__ = ["FusedPointwise"]

SHAPE = FusedShape(2, 2, 96, 1)
STAGES = (3, 2)


class PointwiseArgs(ctypes.Structure):
    """See ``fused_pointwise.cu``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "w0", "bias0", "w1", "bias1", "y")),
        *((name, ctypes.c_int64) for name in ("x_stride", "y_stride", "w0_stride", "w1_stride")),
        *(
            (name, ctypes.c_int32)
            for name in (
                "inputs",
                "middles",
                "outputs",
                "passes",
                "stages",
                "pixels",
                "tiles",
                "activation0",
                "activation1",
                "wide_stores",
            )
        ),
    )


@dataclass(frozen=True, slots=True)
class PointwiseTiling:
    """Passes of a block over the intermediate, parts of the outputs, stages of the ring."""

    passes: int
    splits: int
    stages: int
    shared_bytes: int


class FusedPointwise:
    """1x1, then 1x1, both of one group, 16 bits, channels last.

    Right on an H200, but its time beside two launches' is not measured: plans do not choose it.
    """

    name = "fused_pointwise"

    def __init__(self, *, hopper: bool = True) -> None:
        """With Hopper's own products where there are any."""
        self._hopper = hopper

    def why_not(self, work: FusedWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Judged by nothing that cutting a problem in pieces changes, but for
        sizes that cannot be counted."""
        first, second = work.first, work.second
        if first.dtype not in DTYPES:
            return f"the products of {first.dtype} are not fused"
        if device.capability < (8, 0):
            return f"{device.name} is older than sm_80"
        for which, one in (("first", first), ("second", second)):
            if not is_pointwise(one):
                return f"the {which} convolution is not 1x1 of one group"
        if not _lies_well(first, second):
            return "the channels do not lie side by side in whole 16-byte chunks"
        if first.pixels > MAX_PIXELS:
            return f"the pixels are more than {MAX_PIXELS}"
        if _tiling(work, device) is None:
            channels = first.out_channels
            return f"{channels} channels of {SHAPE.pixels} pixels do not fit the shared memory"
        return None

    def launches(self, work: FusedWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        first, second = work.first, work.second
        tiling = _tiling(work, device)
        if tiling is None:
            raise ValueError("launches of a work for which why_not has a reason")
        args = PointwiseArgs()
        args.x_stride, args.y_stride = first.x.strides[5], second.y.strides[5]
        args.w0_stride, args.w1_stride = first.w.strides[1], second.w.strides[1]
        args.inputs, args.middles = first.in_channels, first.out_channels
        args.outputs = second.out_channels
        args.passes, args.stages = tiling.passes, tiling.stages
        args.pixels = first.pixels
        args.tiles = ceil_div(first.pixels, SHAPE.pixels)
        args.activation0 = ACTIVATIONS[first.activation]
        args.activation1 = ACTIVATIONS[second.activation]
        args.wide_stores = wide_stores(second, SHAPE)
        columns = min(args.tiles, device.multiprocessors // tiling.splits or 1)
        launch = Launch(
            _instance(first.dtype, self._hopper and device.architecture in HOPPER),
            (columns, tiling.splits, 1),
            (SHAPE.threads, 1, 1),
            pack(
                args,
                x=first.x,
                w0=first.w,
                bias0=first.bias,
                w1=second.w,
                bias1=second.bias,
                y=second.y,
            ),
            tiling.shared_bytes,
        )
        return Fragment(f"{self.name}_{SHAPE.pixels}x{SHAPE.outputs}x{tiling.passes}", (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(dtype, warpgroup) for dtype in DTYPES for warpgroup in (False, True)]


def _lies_well(first: ConvWork, second: ConvWork) -> bool:
    w0_extents = (1, first.out_channels, first.in_channels, 1, 1, 1)
    w1_extents = (1, second.out_channels, second.in_channels, 1, 1, 1)
    x_extents = (first.batch, 1, first.in_channels, *first.input)
    return (
        in_whole_chunks(first.x, x_extents, 2)
        and in_whole_chunks(first.w, w0_extents, 2)
        and in_whole_chunks(second.w, w1_extents, 2)
        and second.y.strides[2] == 1
        and flat_pixels(first.x, first.batch, first.input)
        and flat_pixels(second.y, second.batch, second.output)
    )


def _instance(dtype: DType, warpgroup: bool) -> Instance:
    defines = (("ELEMENT", CUDA_TYPES[dtype]), *SHAPE.defines, ("WARPGROUP", str(int(warpgroup))))
    return Instance(
        "fused_pointwise.cu", "fused_pointwise", defines, HOPPER if warpgroup else OTHERS
    )


def _tilings(work: FusedWork, device: CudaDevice) -> Iterator[PointwiseTiling]:
    chunks = ceil_div(work.first.out_channels, CHUNK)
    columns = ceil_div(work.second.out_channels, SHAPE.outputs)
    for stages in STAGES:
        ring = stages * (SHAPE.outputs + SHAPE.pixels) * ROW_BYTES
        shared_bytes = 1024 + ring + chunks * SHAPE.pixels * ROW_BYTES
        # The places of a tile's pixels are static.
        if shared_bytes + SHAPE.pixels * 8 > device.shared_bytes_per_block:
            continue
        for splits in range(1, columns + 1):
            passes = ceil_div(columns, splits)
            if splits == 1 or passes < ceil_div(columns, splits - 1):
                yield PointwiseTiling(passes, splits, stages, shared_bytes)


def _tiling(work: FusedWork, device: CudaDevice) -> PointwiseTiling | None:
    """The one whose blocks have the fewest steps, all waves together."""
    first = work.first
    tiles = ceil_div(first.pixels, SHAPE.pixels)
    again = ceil_div(first.in_channels, CHUNK) * ceil_div(first.out_channels, SHAPE.outputs)
    chunks = ceil_div(first.out_channels, CHUNK)

    def steps(tiling: PointwiseTiling) -> int:
        waves = ceil_div(tiles * tiling.splits, device.multiprocessors)
        return waves * (again + tiling.passes * chunks)

    return min(_tilings(work, device), key=steps, default=None)
