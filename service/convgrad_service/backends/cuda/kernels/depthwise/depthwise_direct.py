"""Channels-last depthwise fprop and dgrad of small problems (depthwise_direct.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    BYTES_S,
    Plane,
    bytes_of,
    plane_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DepthwiseDirect", "DirectGather"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
MOST_INDEX = 2**31 - 1
MOST_ALONG = 2**16 - 1
# Words of x that a thread loads before it waits for the weights.
MOST_WORDS = 64


@dataclass(frozen=True, slots=True)
class DirectGather:
    """A configuration: rows and columns of a thread's results (in dgrad, times the stride), its
    channels, and vectors of channels in a tile."""

    rows: int
    columns: int
    vector: int
    vectors: int

    @property
    def places(self) -> int:
        """Positions of a block."""
        return THREADS // self.vectors


KERNELS = tuple((extent, extent, stride) for extent in (3, 5, 7) for stride in (1, 2))
SHAPES = {1: ((1, 2), (1, 4), (2, 4), (1, 7)), 2: ((1, 2), (1, 4), (2, 2))}
THREADS, BLOCKS = 128, 4
# Of the cost model, fitted to 43 layers on an H200: seconds of a launch with one round of loads;
# instructions of a thread, of an element of x that it reads, of a result and of a tap (besides one
# for each product); what they take of an SM's four schedulers; and of the lesser of their and of
# memory's time, which part is not hidden. On the held-out half it errs by 2 %.
START_S = 4.6e-6
INSTRUCTIONS, PER_READ, PER_RESULT, PER_TAP = 113, 6, 4.3, 4.5
CLOCKS_S = 1.55e9
APART = 0.2


DepthwiseDirectArgs = structure("depthwise/depthwise_direct.cu", "DepthwiseDirectArgs")


class DepthwiseDirect:
    """fwd and bwd_data of the kernels in ``KERNELS`` with one channel per group, channels last,
    any number of channels."""

    name = "depthwise_direct"

    def __init__(self, layout: DirectGather | None = None) -> None:
        self._layout = layout

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        if work.groups == 1 or work.in_channels != 1 or work.out_channels != 1:
            return "not one input and one output channel a group"
        if work.x.strides[1] != 1 or work.y.strides[1] != 1:
            return "the channels are not contiguous"
        if not work.epilogue_free:
            return "an epilogue"
        if work.kernel[0] != 1 or work.stride[0] != 1 or work.pad[0] != 0:
            return "three dimensions"
        if work.input[0] != work.output[0]:
            return "planes that meet nothing"
        rows, columns = work.kernel[1:]
        if work.w.strides[0] != rows * columns or work.w.strides[4:] != (columns, 1):
            return "weights that are not contiguous"
        plane = plane_of(work)
        if plane is None or plane.axes[1] is None or plane.dilation != (1, 1):
            return "two strides, dilated, or one dimension"
        if (*plane.kernel, plane.stride) not in KERNELS:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        for operand, size in ((work.x, work.input), (work.y, work.output)):
            if size[0] > 1 and operand.strides[0] != size[0] * operand.strides[3]:
                return "planes that are not contiguous"
            spans = zip(operand.strides[3:], size, strict=True)
            if sum(stride * extent for stride, extent in spans) > MOST_INDEX:
                return "an image of more than 2^31 elements"
        layout = self.layout(work, device)
        if max(grid_of(work, plane, layout)) > MOST_ALONG:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        return self.fragment(work, device, self.layout(work, device))

    def layout(self, work: ConvWork, device: CudaDevice) -> DirectGather:
        """Return the configuration with the least predicted time."""
        return self._layout or _best(work, device)

    def fragment(self, work: ConvWork, device: CudaDevice, layout: DirectGather) -> Fragment:
        """Return the launch with a configuration."""
        plane = plane_of(work)
        if plane is None:
            raise ValueError("not a plane")
        source, result = work.sides
        down, across = _positions(work, plane, layout)
        args = DepthwiseDirectArgs()
        args.x_stride[:], args.y_stride[:] = plane.strides(source), plane.strides(result)
        args.channels, args.pad[:] = work.groups, plane.pad
        args.x_size[:], args.y_size[:] = _sizes(work, plane)
        args.base[:] = [pad // plane.stride for pad in plane.pad]
        args.positions, args.vectors = plane.batch * down * across, layout.vectors
        args.across, args.down = across, down
        args.by_vectors = divider(layout.vectors)
        args.by_across, args.by_down = divider(across), divider(down)
        taps = plane.kernel[0] * plane.kernel[1]
        bytes_of_weights = layout.vectors * layout.vector * taps * work.dtype.itemsize
        launch = Launch(
            _instance(work.dtype, (*plane.kernel, plane.stride), work.direction, layout),
            (*grid_of(work, plane, layout), 1),
            (THREADS, 1, 1),
            pack(args, x=source, w=work.w, y=result),
            bytes_of_weights,
        )
        expected = expected_s(work, device, layout)
        return Fragment(f"{self.name}_{work.direction}", (launch,), expected_s=expected)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, kernel, direction, DirectGather(*shape, vector, 8))
            for kernel in KERNELS
            for shape in SHAPES[kernel[2]]
            for dtype in DTYPES
            for direction in ("fwd", "bwd_data")
            for vector in ((1, 2) if dtype.itemsize == 2 else (1,))
        ]


def _sizes(work: ConvWork, plane: Plane) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the sizes of the source and of the result."""
    backward = work.direction == "bwd_data"
    return (plane.output, plane.input) if backward else (plane.input, plane.output)


def grid_of(work: ConvWork, plane: Plane, layout: DirectGather) -> tuple[int, int]:
    """Return the tiles of channels, and the blocks of each."""
    down, across = _positions(work, plane, layout)
    return (
        ceil_div(work.groups, layout.vectors * layout.vector),
        ceil_div(plane.batch * down * across, layout.places),
    )


def _positions(work: ConvWork, plane: Plane, layout: DirectGather) -> tuple[int, int]:
    """Return the positions of threads in an image, down and across."""
    sizes = _sizes(work, plane)[1]
    if work.direction == "bwd_data":
        down, across = (
            ceil_div(extent + pad, plane.stride) - pad // plane.stride
            for extent, pad in zip(sizes, plane.pad, strict=True)
        )
    else:
        down, across = sizes
    return ceil_div(down, layout.rows), ceil_div(across, layout.columns)


def _vector(work: ConvWork) -> int:
    """Return the channels of a thread's word: two, if every pixel is aligned to them."""
    if work.dtype.itemsize > 2:
        return 1
    sides = (work.x, work.y)
    numbers = [n for one in sides for n in (one.strides[0], *one.strides[3:])]
    return 1 if any(n % 2 for n in (work.groups, *numbers)) else 2


def layouts_of(work: ConvWork, device: CudaDevice) -> Iterator[DirectGather]:
    """Yield the configurations that may be the fastest."""
    vector = _vector(work)
    all_vectors = ceil_div(work.groups, vector)
    sizes = set()
    for most in (16, 32):
        tiles = ceil_div(all_vectors, most)
        sizes.add(ceil_div(ceil_div(all_vectors, tiles), 8) * 8)
    for rows, columns in SHAPES[work.stride[2]]:
        for vectors in sorted(sizes):
            yield DirectGather(rows, columns, vector, vectors)


@lru_cache(maxsize=1024)
def _best(work: ConvWork, device: CudaDevice) -> DirectGather:
    return min(layouts_of(work, device), key=lambda one: expected_s(work, device, one))


def expected_s(work: ConvWork, device: CudaDevice, layout: DirectGather) -> float:
    """Return the predicted time of a configuration."""
    _, height, width = work.kernel
    stride, backward = work.stride[2], work.direction == "bwd_data"
    reads, results = 1, 1
    for taps, own in ((height, layout.rows), (width, layout.columns)):
        reads *= own + ceil_div(taps, stride) - 1 if backward else (own - 1) * stride + taps
        results *= own * stride if backward else own
    products = layout.rows * layout.columns * height * width * layout.vector
    thread = INSTRUCTIONS + reads * (PER_READ + layout.vector) + results * PER_RESULT
    thread += products + height * width * PER_TAP
    plane = plane_of(work)
    if plane is None:
        raise ValueError("not a plane")
    tiles, blocks = grid_of(work, plane, layout)
    warps = tiles * blocks * THREADS / 32
    busy_s = warps * thread / (device.multiprocessors * 4 * CLOCKS_S)
    memory_s = bytes_of(work) / BYTES_S
    return START_S + max(busy_s, memory_s) + APART * min(busy_s, memory_s)


def _instance(
    dtype: DType, kernel: tuple[int, int, int], direction: str, layout: DirectGather
) -> Instance:
    height, width, stride = kernel
    columns = (layout.columns - 1) * stride + width
    if direction == "bwd_data":
        columns = layout.columns + ceil_div(width, stride) - 1
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL_H": height,
        "KERNEL_W": width,
        "STRIDE": stride,
        "ROWS": layout.rows,
        "COLUMNS": layout.columns,
        "VECTOR": layout.vector,
        "AHEAD": max(1, MOST_WORDS // columns),
        "THREADS": THREADS,
        "BLOCKS": BLOCKS,
        "BACKWARD": int(direction == "bwd_data"),
    }
    return Instance.of("depthwise/depthwise_direct.cu", defines)
