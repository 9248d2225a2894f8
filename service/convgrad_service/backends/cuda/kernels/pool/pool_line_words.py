"""Max pooling's gradient from its input: windows of stride 1, channels last, whole lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.kernels.pool.pool_strips import DTYPES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice, with_shared_bytes
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import PoolWork

__all__ = ["PoolLineWords", "Shape"]

KERNELS = (2, 3, 5)
# Whole lines that a thread can hold; longer ones are divided into tiles with halos.
FULL = (7, 14, 20, 28)
LONGEST = FULL[-1]
REGISTERS, SHARED_OF_MULTIPROCESSOR = 65536, 228 * 1024
# Words of channels, which are whole sectors of memory. Twice as many if registers suffice for two
# such blocks on a multiprocessor.
WORDS = (16, 8)
REGISTERS_OF_THREAD = 96


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of an instance: positions of a line, windows, the tile inside."""

    kernel: int
    lines: int
    windows: int
    tile: int
    pad: int
    per: int  # channels in a word
    words: int = 8
    registers: int = REGISTERS_OF_THREAD

    @classmethod
    def full(cls, lines: int, kernel: int, per: int, words: int = WORDS[-1]) -> Shape:
        """Return the shape of a whole plane with as many windows as positions."""
        registers = REGISTERS_OF_THREAD
        if lines == LONGEST:
            registers = 128 if kernel == 5 else 72 if words == WORDS[0] else registers
        return cls(kernel, lines, lines, lines, (kernel - 1) // 2, per, words, registers)

    @classmethod
    def tiled(cls, kernel: int, per: int) -> Shape:
        """Return the shape of a tile, all windows that overlap it, and all of their positions."""
        tile = LONGEST - 2 * (kernel - 1)
        shape = cls(kernel, LONGEST, LONGEST - kernel + 1, tile, 0, per)
        return shape if kernel < 5 else replace(shape, registers=128)

    @property
    def threads(self) -> int:
        return ceil_div(self.lines * self.words, 32) * 32

    @property
    def shared_bytes(self) -> int:
        row = self.windows * self.words
        row += (self.words - row) % (32 // self.per)
        return self.lines * row * 4 * self.per

    @property
    def blocks(self) -> int:
        by_shared = SHARED_OF_MULTIPROCESSOR // (self.shared_bytes + 1024)
        return max(1, min(by_shared, REGISTERS // (self.threads * self.registers)))


LineWordArgs = structure("pool/pool_line_words.cu", "LineWordArgs")


class PoolLineWords:
    """bwd from the input, channels last, square windows of ``KERNELS``, stride 1."""

    name = "pool_line_words"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        if work.dilated:
            return "dilated"
        kernel, stride = work.kernel, work.stride
        if kernel[1] != kernel[2] or kernel[1] not in KERNELS or stride[1:] != (1, 1):
            return f"no instance for kernel {kernel} and stride {stride}"
        if kernel[0] != 1 or stride[0] != 1 or work.pad[0] != 0 or work.input[0] != work.output[0]:
            return "windows with a depth"
        if not all(operand.channels_last for operand in (work.source, work.x, work.y)):
            return "the channels are not contiguous"
        least = WORDS[-1] * _per_word(work.dtype)
        if work.channels % least != 0:
            return f"the channels are not a multiple of {least}"
        if image_elements(work) * work.dtype.itemsize >= 2**31:
            return "an image of more than 2^31 bytes"
        reason = device.why_not_shared(_shape(work).shared_bytes)
        if reason is not None:
            return reason
        if _blocks(work, _shape(work)) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        shape = _shape(work)
        args = LineWordArgs()
        fill_strides(args, work, 3)
        args.channel_tiles = work.channels // (shape.per * shape.words)
        args.planes = work.input[0]
        args.x_size[:], args.y_size[:] = work.input[1:], work.output[1:]
        args.tiles[:] = _tiles(work, shape)
        if not shape.pad:
            args.window_offset[:] = first = [pad - shape.kernel + 1 for pad in work.pad[1:]]
            args.box_offset[:] = [
                window - pad for window, pad in zip(first, work.pad[1:], strict=True)
            ]
        launch = Launch(
            _instance(work.dtype, shape),
            (_blocks(work, shape), 1, 1),
            (shape.threads, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
            shape.shared_bytes,
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        found = []
        for dtype in DTYPES:
            per = _per_word(dtype)
            shapes = [Shape.tiled(kernel, per) for kernel in KERNELS]
            shapes += [
                Shape.full(lines, kernel, per, words)
                for kernel in KERNELS
                if kernel % 2
                for lines in FULL
                for words in WORDS
                if words == WORDS[-1] or _fits_twice(lines, kernel)
            ]
            found += [_instance(dtype, shape) for shape in shapes]
        return found


def _per_word(dtype: DType) -> int:
    return 4 // dtype.itemsize


def _fits_twice(lines: int, kernel: int) -> bool:
    return lines < LONGEST or kernel < 5


def _shape(work: PoolWork) -> Shape:
    kernel, per = work.kernel[1], _per_word(work.dtype)
    extent = max(work.input[1:])
    whole = (
        kernel % 2 == 1
        and work.pad[1:] == ((kernel - 1) // 2,) * 2
        and work.output[1:] == work.input[1:]
        and extent <= LONGEST
    )
    if whole:
        lines = next(lines for lines in FULL if lines >= extent)
        wide = _fits_twice(lines, kernel) and work.channels % (WORDS[0] * per) == 0
        return Shape.full(lines, kernel, per, WORDS[0] if wide else WORDS[-1])
    return Shape.tiled(kernel, per)


def _tiles(work: PoolWork, shape: Shape) -> tuple[int, int]:
    return ceil_div(work.input[1], shape.tile), ceil_div(work.input[2], shape.tile)


def _blocks(work: PoolWork, shape: Shape) -> int:
    channel_tiles = work.channels // (shape.per * shape.words)
    return work.batch * work.input[0] * channel_tiles * prod(_tiles(work, shape))


def _instance(dtype: DType, shape: Shape) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL": shape.kernel,
        "LINES": shape.lines,
        "WINDOWS": shape.windows,
        "TILE": shape.tile,
        "PAD": shape.pad,
        "WORDS": shape.words,
        "THREADS": shape.threads,
        "BLOCKS": shape.blocks,
    }
    return Instance.of("pool/pool_line_words.cu", defines, with_shared_bytes(shape.shared_bytes))
