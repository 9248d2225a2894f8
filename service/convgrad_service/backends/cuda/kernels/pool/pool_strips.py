"""Max pooling's gradient from its input: overlapping windows, a word of channels per thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS, linear_grid
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import Operand, PoolWork

__all__ = ["DTYPES", "PoolStrips", "Window", "in_words", "per_word"]

BLOCK = 128
DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, stride and padding along H and W; rows of a thread; blocks per multiprocessor."""

    kernel: int
    stride: int
    pad: int
    rows: int
    blocks: int


# By channels in a word. More rows share more loads; two channels need more registers.
WINDOWS: Mapping[int, tuple[Window, ...]] = {
    2: (Window(3, 2, 1, rows=4, blocks=5),),
    1: (Window(3, 2, 1, rows=8, blocks=4),),
}


StripArgs = structure("pool/pool_strips.cu", "StripArgs")


class PoolStrips:
    """bwd from the input, channels last, the windows of ``WINDOWS``."""

    name = "pool_strips"

    def __init__(self, windows: Mapping[int, tuple[Window, ...]] = WINDOWS) -> None:
        """Other windows are for tuning."""
        self._windows = windows

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.source is None:
            return "the indices are given"
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        if work.dilated:
            return "dilated"
        if self._window(work) is None:
            return (
                f"no instance for kernel {work.kernel}, stride {work.stride} and padding {work.pad}"
            )
        if not all(in_words(work, operand) for operand in (work.source, work.x, work.y)):
            return "the channels are not contiguous whole words"
        if image_elements(work) * work.dtype.itemsize >= 2**31:
            return "an image of more than 2^31 bytes"
        if self._threads(work, device) > MAX_BLOCKS * BLOCK:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        window = self._window(work)
        if work.source is None or window is None:
            raise ValueError("a pooling's gradient without its input, or of other windows")
        args = StripArgs()
        fill_strides(args, work, 2)
        args.threads, args.words = (
            self._threads(work, device),
            work.channels // per_word(work.dtype),
        )
        args.x_size[:], args.y_size[:] = work.input, work.output
        args.tiles = ceil_div(work.input[1], window.rows)
        args.strip = _strip(work, window, device)
        args.strips = ceil_div(work.input[2], args.strip)
        launch = Launch(
            _instance(work.dtype, window),
            linear_grid(args.threads, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, window)
            for dtype in DTYPES
            for window in self._windows[per_word(dtype)]
        ]

    def _window(self, work: PoolWork) -> Window | None:
        kernel, stride, pad = work.kernel, work.stride, work.pad
        flat = kernel[0] == stride[0] == 1 and pad[0] == 0 and work.input[0] == work.output[0]
        for window in self._windows[per_word(work.dtype)]:
            asked = (window.kernel,) * 2, (window.stride,) * 2, (window.pad,) * 2
            if flat and asked == (kernel[1:], stride[1:], pad[1:]):
                return window
        return None

    def _threads(self, work: PoolWork, device: CudaDevice) -> int:
        window = self._window(work)
        if window is None:
            raise ValueError("no such window")
        strips = ceil_div(work.input[2], _strip(work, window, device))
        return strips * _lines(work, window)


def _lines(work: PoolWork, window: Window) -> int:
    """Return the threads of one strip."""
    tiles = ceil_div(work.input[1], window.rows)
    return work.batch * work.input[0] * tiles * (work.channels // per_word(work.dtype))


def _strip(work: PoolWork, window: Window, device: CudaDevice) -> int:
    """Return the columns of a strip.

    Few fill the last wave of blocks; many share fewer columns with the next strip.
    """
    together = device.multiprocessors * window.blocks * BLOCK
    lines, width = _lines(work, window), work.input[2]

    def expected(strips: int) -> float:
        columns = _columns(width, strips, window)
        waves = ceil_div(lines * ceil_div(width, columns), together)
        # Columns that two strips read, and a strip's fixed cost, in columns.
        return waves * (columns + 2 * (window.kernel - window.stride) + 4)

    best = min(range(1, max(1, width // 4) + 1), key=expected)
    return _columns(width, best, window)


def _columns(width: int, strips: int, window: Window) -> int:
    """Return the columns of one strip, a multiple of the stride."""
    return ceil_div(ceil_div(width, strips), window.stride) * window.stride


def per_word(dtype: DType) -> int:
    """Return the channels in a 32-bit word."""
    return 4 // dtype.itemsize


def in_words(work: PoolWork, operand: Operand) -> bool:
    """Whether a position's channels are contiguous, aligned, whole words."""
    n, _, c, *rest = operand.strides
    per = per_word(work.dtype)
    extents = (work.batch, *work.input)
    return (
        c == 1
        and work.channels % per == 0
        and all(
            stride % per == 0
            for stride, extent in zip((n, *rest), extents, strict=True)
            if extent > 1
        )
    )


def _instance(dtype: DType, window: Window) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL": window.kernel,
        "STRIDE": window.stride,
        "PAD": window.pad,
        "ROWS": window.rows,
        "BLOCKS": window.blocks,
    }
    return Instance.of("pool/pool_strips.cu", defines)
