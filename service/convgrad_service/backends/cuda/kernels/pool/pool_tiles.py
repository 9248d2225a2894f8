"""Max pooling's gradient from its input: windows of stride 1, channels last, whole lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice, with_shared_bytes
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import PoolWork

__all__ = ["PoolTiles", "Shape"]

# Whole lines that a thread can hold, of kernels that are faster here than as strips.
LINES, WHOLE_KERNELS = (7, 14, 20, 28), (3, 5)
# Longer lines are divided into tiles with halos; other kernels are faster as strips.
LONGEST, TILED_KERNEL = LINES[-1], 5
REGISTERS, SHARED_OF_MULTIPROCESSOR = 65536, 228 * 1024
# Words of channels, which are whole sectors of memory. Twice as many if registers suffice for two
# such blocks on a multiprocessor.
WORDS = (16, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of an instance; ``whole`` if one tile is a plane, with all of its windows."""

    kernel: int
    lines: int
    whole: bool
    dtype: DType
    words: int

    @property
    def per(self) -> int:
        """Channels in a word."""
        return 4 // self.dtype.itemsize

    @property
    def windows(self) -> int:
        """Windows along a line: those over its own positions, or those that overlap a tile."""
        return self.lines if self.whole else self.lines - self.kernel + 1

    @property
    def tile(self) -> int:
        return self.lines if self.whole else self.lines - 2 * (self.kernel - 1)

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
        """Blocks per multiprocessor."""
        registers = 96
        if self.lines == LONGEST:
            registers = 128 if self.kernel == 5 else 72 if self.words == WORDS[0] else 96
        by_shared = SHARED_OF_MULTIPROCESSOR // (self.shared_bytes + 1024)
        return max(1, min(by_shared, REGISTERS // (self.threads * registers)))

    def tiles(self, work: PoolWork) -> tuple[int, int, int]:
        """Return the tiles along the channels, H and W."""
        h, w = (ceil_div(extent, self.tile) for extent in work.input[1:])
        return work.channels // (self.per * self.words), h, w

    def grid(self, work: PoolWork) -> int:
        return work.batch * work.input[0] * prod(self.tiles(work))

    def instance(self) -> Instance:
        return Instance.of(
            "pool/pool_tiles.cu",
            with_shared_bytes(self.shared_bytes),
            ELEMENT=self.dtype,
            **macros_of(self, "kernel", "lines", "windows", "tile"),
            PAD=(self.kernel - 1) // 2 if self.whole else 0,
            **macros_of(self, "words", "threads", "blocks"),
        )


TileArgs = structure("pool/pool_tiles.cu", "TileArgs")


class PoolTiles(Solver[PoolWork, Shape]):
    """bwd from the input, channels last, square windows of stride 1 of some kernels."""

    name = "pool_tiles"

    def solve(self, work: PoolWork, device: CudaDevice) -> Shape | str:
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        if work.dilated:
            return "dilated"
        shape = _shape(work)
        if shape is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if not all(operand.channels_last for operand in (work.source, work.x, work.y)):
            return "the channels are not contiguous"
        if work.channels % (shape.per * shape.words) != 0:
            return f"the channels are not a multiple of {shape.per * shape.words}"
        if image_elements(work) * work.dtype.itemsize >= 2**31:
            return "an image of more than 2^31 bytes"
        return shape

    def fragment(self, work: PoolWork, device: CudaDevice, shape: Shape) -> Fragment:
        args = TileArgs()
        fill_strides(args, work, 3)
        args.channel_tiles, *args.tiles[:] = shape.tiles(work)
        args.planes = work.input[0]
        args.x_size[:], args.y_size[:] = work.input[1:], work.output[1:]
        if not shape.whole:
            args.window_offset[:] = [pad - shape.kernel + 1 for pad in work.pad[1:]]
            args.box_offset[:] = [1 - shape.kernel] * 2
        launch = Launch(
            shape.instance(),
            (shape.grid(work), 1, 1),
            (shape.threads, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
            shape.shared_bytes,
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        for dtype in DTYPES:
            yield Shape(TILED_KERNEL, LONGEST, False, dtype, WORDS[-1]).instance()
            for kernel, lines in product(WHOLE_KERNELS, LINES):
                for words in WORDS[not _fits_twice(kernel, lines) :]:
                    yield Shape(kernel, lines, True, dtype, words).instance()


def _fits_twice(kernel: int, lines: int) -> bool:
    return lines < LONGEST or kernel < 5


def _shape(work: PoolWork) -> Shape | None:
    flat = work.kernel[0] == 1 and work.input[0] == work.output[0] and work.pad[0] == 0
    kernel = work.kernel[1]
    if not flat or work.stride != (1, 1, 1) or work.kernel[2] != kernel:
        return None
    if work.pad[1:] == ((kernel - 1) // 2,) * 2 and kernel in WHOLE_KERNELS:
        for lines in LINES:
            if work.output == work.input and max(work.input[1:]) <= lines:
                twice = work.channels % (WORDS[0] * 4 // work.dtype.itemsize) == 0
                wide = twice and _fits_twice(kernel, lines)
                return Shape(kernel, lines, True, work.dtype, WORDS[0] if wide else WORDS[-1])
    if kernel != TILED_KERNEL:
        return None
    return Shape(kernel, LONGEST, False, work.dtype, WORDS[-1])
