"""A depthwise convolution and a pointwise one after it, in one kernel, on tensor cores."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, CUDA_TYPES
from convgrad_service.backends.cuda.kernels.fused.fused_shapes import (
    CHUNK,
    DTYPES,
    MAX_PIXELS,
    OTHERS,
    ROW_BYTES,
    Divider,
    FusedShape,
    is_pointwise,
    lies_well,
    wide_stores,
)
from convgrad_service.backends.cuda.kernels.fused.fused_tiling import (
    SLIDING,
    FusedTiling,
    ahead_of,
    expected_s,
    room_for,
    sliding_of,
    strip_pixels,
    tilings,
)
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, FusedWork

__all__ = ["FusedSeparable"]

MAX_INDEX = 2**31 - 2**24
MAX_EXTENT = 2**20
MAX_TAPS = 128
# Measured on the suite's separable layers, on one H200: with more channels one launch takes longer
# than two, for its steps of 64 channels wait for each other.
MOST_CHANNELS, MOST_OUTPUTS = 64, 128


DIVIDERS = (
    "by_width",
    "by_strips",
    "by_height",
    "by_depth",
    "by_plane",
    "by_across",
)


class FusedArgs(ctypes.Structure):
    """See ``fused_args.cuh``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "w0", "bias0", "w1", "bias1", "y")),
        *((f"{name}_stride", ctypes.c_int64 * 4) for name in ("x", "y")),
        ("w1_stride", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                "channels",
                "outputs",
                "chunks",
                "passes",
                "stages",
                "resident",
                "slots",
                "lanes",
                "tiles",
                "pixels",
                "rows",
                "tile_width",
                "tile_height",
                "tiles_across",
                "tiles_down",
                "activation0",
                "activation1",
                "wide_stores",
            )
        ),
        *((name, Divider) for name in DIVIDERS),
        *(
            (name, ctypes.c_int32 * 3)
            for name in ("kernel", "stride", "dilation", "pad", "input", "output")
        ),
    )


GENERAL = (
    FusedShape(1, 1, 64, 4, single=True),
    FusedShape(1, 2, 64, 3, single=True),
)
ON_HOPPER = (
    FusedShape(1, 1, 128, 2, roles=True),
    FusedShape(1, 2, 64, 2, roles=True),
)


class FusedSeparable:
    """Depthwise, then pointwise, 16 bits, channels last."""

    name = "fused_separable"

    def __init__(self, shapes: Iterable[FusedShape] | None = None, *, hopper: bool = True) -> None:
        """Of these shapes alone, and of all channels that they can compute; with Hopper's own
        products where there are any."""
        self._shapes = None if shapes is None else tuple(shapes)
        self._hopper = hopper

    def _on(self, device: CudaDevice) -> tuple[bool, tuple[FusedShape, ...]]:
        """Whether with Hopper's products, and in which shapes."""
        hopper = self._hopper and device.architecture in HOPPER
        return hopper, self._shapes or (ON_HOPPER if hopper else GENERAL)

    def why_not(self, work: FusedWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Judged by nothing that cutting a problem in pieces changes, but for
        sizes that cannot be counted."""
        first, second = work.first, work.second
        if first.dtype not in DTYPES:
            return f"the products of {first.dtype} are not fused; two launches are no slower"
        if device.capability < (8, 0):
            return f"{device.name} is older than sm_80"
        if not is_pointwise(second):
            return "the second convolution is not 1x1 of one group"
        if first.in_channels != 1 or first.out_channels != 1:
            return "the first convolution is not depthwise"
        if first.taps > MAX_TAPS:
            return f"{first.taps} taps are more than {MAX_TAPS}"
        chunk = ROW_BYTES // 8 // first.dtype.itemsize
        if first.groups % chunk:
            return f"{first.groups} channels are no multiple of {chunk}"
        if not lies_well(first, second):
            return "the channels do not lie side by side"
        if work.first.batch * prod(first.output) > MAX_PIXELS:
            return f"the pixels are more than {MAX_PIXELS}"
        if _reach(first) > MAX_INDEX:
            return f"the input reaches beyond element {MAX_INDEX}"
        if max(*first.input, *first.output, *first.pad) > MAX_EXTENT:
            return f"positions reach beyond {MAX_EXTENT}"
        if self._shapes is None and (reason := _slower(first, second)) is not None:
            return reason
        if not any(tilings(work, device, self._on(device)[1])):
            return "the weights of a chunk of channels do not fit the shared memory"
        return None

    def launches(
        self, work: FusedWork, device: CudaDevice, tiling: FusedTiling | None = None
    ) -> Fragment:
        """See `Family.launches`; ``tiling`` where another than the chosen one is tried."""
        first, second = work.first, work.second
        hopper, shapes = self._on(device)
        if tiling is None:
            fitting = tilings(work, device, shapes)
            tiling = min(fitting, key=lambda one: expected_s(one, work, device))
        shape = tiling.shape
        depth, height, width = first.output
        args = FusedArgs()
        args.x_stride[:] = (first.x.strides[0], *first.x.strides[3:])
        args.y_stride[:] = (second.y.strides[0], *second.y.strides[3:])
        args.w1_stride = second.w.strides[1]
        args.channels, args.outputs = first.groups, second.out_channels
        args.chunks = ceil_div(first.groups, CHUNK)
        args.passes, args.stages, args.slots = tiling.passes, tiling.stages, tiling.slots
        args.resident = tiling.resident
        args.lanes = 3 if first.groups > 32 else 2 if first.groups > 16 else 1
        args.tiles = tiling.tiles
        args.pixels = first.pixels
        args.rows = first.batch * depth * height
        args.tile_width = tiling.tile_width
        if tiling.tile_width:
            args.tile_height = shape.pixels // tiling.tile_width
            args.tiles_across = ceil_div(width, tiling.tile_width)
            args.tiles_down = ceil_div(height, args.tile_height)
            args.by_plane = Divider.of(args.tiles_across * args.tiles_down)
            args.by_across = Divider.of(args.tiles_across)
        row = tiling.tile_width or width
        args.by_width, args.by_strips = (
            Divider.of(row),
            Divider.of(ceil_div(row, strip_pixels(sliding_of(first)))),
        )
        args.by_height, args.by_depth = Divider.of(height), Divider.of(depth)
        args.activation0 = ACTIVATIONS[first.activation]
        args.activation1 = ACTIVATIONS[second.activation]
        args.wide_stores = wide_stores(second, shape)
        for name in ("kernel", "stride", "dilation", "pad", "input", "output"):
            getattr(args, name)[:] = getattr(first, name)
        columns = min(tiling.tiles, room_for(tiling, device) // tiling.splits or 1)
        launch = Launch(
            _instance(shape, first.dtype, sliding_of(first), hopper),
            (columns, tiling.splits, 1),
            (shape.threads, 1, 1),
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
        return Fragment(f"{self.name}_{shape.pixels}x{shape.outputs}x{tiling.passes}", (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        each = ((shape, True) for shape in ON_HOPPER), ((shape, False) for shape in GENERAL)
        return [
            _instance(shape, dtype, sliding, hopper)
            for shapes in each
            for shape, hopper in shapes
            for dtype in DTYPES
            for sliding in ((0, 0), *SLIDING)
        ]


def _slower(first: ConvWork, second: ConvWork) -> str | None:
    """Why two launches take less, judged by channels alone, so that pieces choose as the whole."""
    if first.groups > MOST_CHANNELS or second.out_channels > MOST_OUTPUTS:
        return (
            f"from {first.groups} to {second.out_channels} channels two launches take less than "
            f"one: at most {MOST_CHANNELS} to {MOST_OUTPUTS} are fused"
        )
    return None


def _reach(first: ConvWork) -> int:
    """The input's last element."""
    extents = (first.batch, *first.input)
    strides = (first.x.strides[0], *first.x.strides[3:])
    return (
        sum((extent - 1) * stride for extent, stride in zip(extents, strides, strict=True))
        + first.groups
    )


def _instance(
    shape: FusedShape, dtype: DType, sliding: tuple[int, int], warpgroup: bool
) -> Instance:
    if shape.roles and not warpgroup:
        raise ValueError("threads with roles of their own need Hopper's products")
    defines: tuple[tuple[str, str], ...] = (
        ("ELEMENT", CUDA_TYPES[dtype]),
        *shape.defines,
        ("SINGLE", str(int(shape.single))),
        ("WIDTH", str(sliding[0])),
        ("STRIDE", str(sliding[1])),
        ("ROWS", str(SLIDING.get(sliding, 0))),
        ("STRIP", str(strip_pixels(sliding))),
        ("AHEAD", str(ahead_of(shape, sliding))),
        ("WARPGROUP", str(int(warpgroup))),
    )
    if shape.roles:
        defines = (*defines, *shape.registers)
        return Instance("fused/fused_roles.cu", "fused_roles", defines, HOPPER)
    return Instance(
        "fused/fused_separable.cu", "fused_separable", defines, HOPPER if warpgroup else OTHERS
    )
