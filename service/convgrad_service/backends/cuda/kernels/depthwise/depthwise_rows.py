"""Channels-last depthwise fprop and dgrad, a row of taps at a time (depthwise_rows.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import BYTES_S, bytes_of
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["DepthwiseRows", "RowsGather", "layouts_of"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
MOST_INDEX = 2**31 - 1
# The limit of gridDim.y.
MOST_ALONG = 2**16 - 1
KERNELS, STRIDES, COLUMNS = (3, 5, 7), (1, 2), (2, 4, 7)
THREADS, BLOCKS = 128, 4
# Words of x that a thread may have loaded ahead.
MOST_WORDS = 32
# Of the cost model, fitted to 79 layers on an H200, where it erred by 5 % on the unseen half:
# seconds of a launch with one round of loads, and of a row of taps after the first ones, if nothing
# else takes longer; instructions of a thread, of a row of taps, of an element of x that it reads,
# of a result, of a tap and of a weight that it copies (besides one for each product); what they
# take of an SM's four schedulers.
START_S, STEP_S, EARLY_STEPS = 4.67e-6, 0.306e-6, 3
INSTRUCTIONS, PER_STEP, PER_READ, PER_RESULT, PER_TAP, PER_WEIGHT = 146, 3.3, 4.7, 20, 5.3, 12.9
CLOCKS_S = 1.46e9
# Of the lesser of the times of arithmetic and of waiting, the part that is not hidden.
APART = 0.3


@dataclass(frozen=True, slots=True)
class RowsGather:
    """A configuration: columns of taps of an instance, stride along W, a thread's columns of the
    result (in dgrad, times the stride) and channels, and vectors of channels in a tile."""

    kernel: int
    stride: int
    columns: int
    vector: int
    vectors: int

    @property
    def places(self) -> int:
        """Positions of a block."""
        return THREADS // self.vectors


DepthwiseRowsArgs = structure("depthwise/depthwise_rows.cu", "DepthwiseRowsArgs")


class DepthwiseRows:
    """fwd and bwd_data with one channel per group, channels last, of any number of channels, kernel
    and padding, in one to three dimensions."""

    name = "depthwise_rows"

    def __init__(self, layout: RowsGather | None = None) -> None:
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
        if work.stride[2] not in STRIDES:
            return f"a stride of {work.stride[2]} along W"
        if work.dilation[2] != 1 and work.kernel[2] != 1:
            return "dilated along W"
        for stride, dilation, kernel in zip(work.stride, work.dilation, work.kernel, strict=True):
            if stride > 1 and dilation > 1 and kernel > 1:
                return "both strided and dilated"
        if not _contiguous(work):
            return "weights that are not contiguous"
        if any(pad < 0 for pad in work.pad):
            return "negative padding"
        for operand, size in ((work.x, work.input), (work.y, work.output)):
            spans = zip(operand.strides[3:], size, strict=True)
            if sum(stride * extent for stride, extent in spans) > MOST_INDEX:
                return "an image of more than 2^31 elements"
        layout = self.layout(work, device)
        if max(_grid(work, layout)) > MOST_ALONG:
            return "more blocks than a grid can have"
        return device.why_not_shared(_shared_bytes(work, layout))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        return self.fragment(work, device, self.layout(work, device))

    def layout(self, work: ConvWork, device: CudaDevice) -> RowsGather:
        """Return the configuration with the least predicted time."""
        return self._layout or _best(work, device)

    def fragment(self, work: ConvWork, device: CudaDevice, layout: RowsGather) -> Fragment:
        """Return the launch with a configuration."""
        source, result = work.sides
        args = DepthwiseRowsArgs()
        args.x_stride[:], args.y_stride[:] = _strides(source), _strides(result)
        args.channels = work.groups
        args.x_size[:], args.y_size[:] = work.sizes
        args.kernel[:], args.pad[:] = work.kernel, work.pad
        args.stride[:], args.dilation[:] = work.stride[:2], work.dilation[:2]
        args.parts, args.part = _parts(work)
        args.base = work.pad[2] // work.stride[2]
        args.across = across = _across(work, layout)
        planes, rows, _ = work.sizes[1]
        args.positions = work.batch * planes * rows * across
        args.vectors, args.places = layout.vectors, layout.places
        args.by_vectors, args.by_across = divider(layout.vectors), divider(across)
        args.by_rows, args.by_planes = divider(rows), divider(planes)
        args.by_stride[0].factor, args.by_stride[0].shift = divider(work.stride[0])
        args.by_stride[1].factor, args.by_stride[1].shift = divider(work.stride[1])
        launch = Launch(
            _instance(work.dtype, work.direction, layout),
            (*_grid(work, layout), 1),
            (THREADS, 1, 1),
            pack(args, x=source, w=work.w, y=result),
            _shared_bytes(work, layout),
        )
        expected = expected_s(work, device, layout)
        return Fragment(f"{self.name}_{work.direction}", (launch,), expected_s=expected)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, direction, RowsGather(kernel, stride, columns, vector, 8))
            for kernel in KERNELS
            for stride in STRIDES
            for columns in COLUMNS
            for dtype in DTYPES
            for direction in ("fwd", "bwd_data")
            for vector in ((1, 2) if dtype.itemsize == 2 else (1,))
        ]


def _grid(work: ConvWork, layout: RowsGather) -> tuple[int, int]:
    """Return the tiles of channels, and the blocks of each."""
    lines = work.batch * prod(work.sizes[1][:2])
    return (
        ceil_div(work.groups, layout.vectors * layout.vector),
        ceil_div(lines * _across(work, layout), layout.places),
    )


def _strides(operand: Operand) -> tuple[int, ...]:
    return operand.strides[0], *operand.strides[3:]


def _contiguous(work: ConvWork) -> bool:
    """Whether the weights of all channels are contiguous; dimensions of one tap have no stride."""
    expected = work.taps
    for stride, extent in zip(
        (work.w.strides[0], *work.w.strides[3:]), (0, *work.kernel), strict=True
    ):
        if extent:
            expected //= extent
        if extent != 1 and stride != expected:
            return False
    return True


def _parts(work: ConvWork) -> tuple[int, int]:
    """Return the parts of a row of taps, and their columns."""
    stride = work.stride[2] if work.direction == "bwd_data" else 1
    columns = work.kernel[2]
    if columns <= KERNELS[-1]:
        return 1, columns
    part = ceil_div(ceil_div(columns, ceil_div(columns, KERNELS[-1] // stride * stride)), stride)
    return ceil_div(columns, part * stride), part * stride


def _across(work: ConvWork, layout: RowsGather) -> int:
    """Return the positions of threads in a row of the result."""
    columns, pad, stride = work.sizes[1][2], work.pad[2], work.stride[2]
    if work.direction == "bwd_data":
        columns = ceil_div(columns + pad, stride) - pad // stride
    return ceil_div(columns, layout.columns)


def _read(layout: RowsGather, backward: bool) -> int:
    """Return the elements of a row of x that a thread reads."""
    if backward:
        return layout.columns + ceil_div(layout.kernel, layout.stride) - 1
    return (layout.columns - 1) * layout.stride + layout.kernel


def _shared_bytes(work: ConvWork, layout: RowsGather) -> int:
    return layout.vectors * layout.vector * work.taps * work.dtype.itemsize


def _vector(work: ConvWork) -> int:
    """Return the channels of a thread's word: two, if every pixel is aligned to them."""
    if work.dtype.itemsize > 2:
        return 1
    numbers = [n for operand in (work.x, work.y) for n in _strides(operand)]
    return 1 if any(n % 2 for n in (work.groups, *numbers)) else 2


def layouts_of(work: ConvWork, device: CudaDevice) -> Iterator[RowsGather]:
    """Yield the configurations that may be the fastest."""
    vector = _vector(work)
    kernel = next(one for one in KERNELS if one >= _parts(work)[1])
    all_vectors = ceil_div(work.groups, vector)
    sizes = set()
    for most in (16, 32):
        tiles = ceil_div(all_vectors, most)
        sizes.add(ceil_div(ceil_div(all_vectors, tiles), 4) * 4)
    for columns in COLUMNS:
        for vectors in sorted(sizes):
            yield RowsGather(kernel, work.stride[2], columns, vector, vectors)


@lru_cache(maxsize=1024)
def _best(work: ConvWork, device: CudaDevice) -> RowsGather:
    return min(layouts_of(work, device), key=lambda one: expected_s(work, device, one))


def expected_s(work: ConvWork, device: CudaDevice, layout: RowsGather) -> float:
    """Return the predicted time of a configuration."""
    backward = work.direction == "bwd_data"
    products = layout.columns * layout.kernel * layout.vector
    step = PER_STEP + _read(layout, backward) * (PER_READ + layout.vector) + products
    step += layout.kernel * layout.vector * PER_TAP
    steps, most_steps = 1.0 * _parts(work)[0], _parts(work)[0]
    for taps, stride in zip(work.kernel[:2], work.stride[:2], strict=True):
        steps *= taps / stride if backward else taps
        most_steps *= ceil_div(taps, stride) if backward else taps
    results = layout.columns * (layout.stride if backward else 1)
    thread = INSTRUCTIONS + results * PER_RESULT + steps * step
    thread += layout.vectors * work.taps / THREADS * PER_WEIGHT
    tiles, blocks = _grid(work, layout)
    busy_s = tiles * blocks * THREADS / 32 * thread / (device.multiprocessors * 4 * CLOCKS_S)
    waits_s = STEP_S * max(0, most_steps - EARLY_STEPS)
    memory_s = bytes_of(work) / BYTES_S
    return START_S + max(busy_s, waits_s, memory_s) + APART * min(busy_s, waits_s)


def _instance(dtype: DType, direction: str, layout: RowsGather) -> Instance:
    kernel, stride, columns = layout.kernel, layout.stride, layout.columns
    read = _read(layout, direction == "bwd_data")
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL": kernel,
        "STRIDE": stride,
        "COLUMNS": columns,
        "VECTOR": layout.vector,
        "AHEAD": max(2, min(kernel, MOST_WORDS // read)),
        "THREADS": THREADS,
        "BLOCKS": BLOCKS,
        "BACKWARD": int(direction == "bwd_data"),
    }
    return Instance.of("depthwise/depthwise_rows.cu", defines)
