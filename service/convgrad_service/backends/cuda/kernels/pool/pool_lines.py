"""Max pooling's gradient from its input: windows that overlap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice, with_shared_bytes
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import PoolWork, Size3

__all__ = ["FULL", "Box", "PoolLines", "blocks_held", "is_flat"]

# A block's channels are whole sectors of memory; a key has 4 bytes for 16-bit types, else 8.
CHANNELS = {DType.FLOAT16: 16, DType.BFLOAT16: 16, DType.FLOAT32: 8}
# Whole lines that a thread can hold; longer ones are divided into tiles with halos.
FULL = (7, 14, 20, 28)
REGISTERS = 65536
SHARED_OF_MULTIPROCESSOR = 228 * 1024
# Kernel and stride, along D and along both H and W.
WINDOWS = ((1, 1, 2, 1), (1, 1, 3, 1), (1, 1, 5, 1), (1, 1, 3, 2), (3, 1, 3, 1), (3, 2, 3, 2))


@dataclass(frozen=True, slots=True)
class Box:
    """What a thread holds along H or W: a line of positions, windows, and the tile inside."""

    lines: int
    windows: int
    tile: int
    pad: int

    @classmethod
    def full(cls, lines: int, kernel: int) -> Box:
        """Return the box of the whole input, stride 1, with as many windows as positions."""
        return cls(lines, lines, lines, (kernel - 1) // 2)

    @classmethod
    def tiled(cls, kernel: int, stride: int, depth: int = 1) -> Box:
        """A tile with all windows that touch it and all positions that those reach.

        Where windows have a ``depth`` the sums of a ring of planes take registers, of which fewer
        threads have more.
        """
        of_flat = 28 if stride > 1 else 28 - 2 * (kernel - 1)
        tile = of_flat if depth == 1 else 20
        windows = max(
            (tile - 1 + phase) // stride - ceil_div(phase - kernel + 1, stride) + 1
            for phase in range(stride)
        )
        return cls((windows - 1) * stride + kernel, windows, tile, 0)


LineArgs = structure("pool/pool_lines.cu", "LineArgs")


@dataclass(frozen=True, slots=True)
class Shape:
    """The parameters of an instance other than its type."""

    depth: tuple[int, int]  # kernel and stride along D
    kernel: int
    stride: int
    box: Box
    channels: int
    key_bytes: int
    first: bool  # channels first

    @property
    def threads(self) -> int:
        return ceil_div(max(self.box.lines, self.box.windows) * self.channels, 32) * 32

    @property
    def shared_bytes(self) -> int:
        step = self.channels + self.first
        rows = [self._padded(extent * step) for extent in (self.box.lines, self.box.windows)]
        return self.box.lines * (self.depth[0] * rows[0] + rows[1]) * self.key_bytes

    def _padded(self, extent: int) -> int:
        if self.first or extent % (2 * self.channels) == self.channels:
            return extent
        return extent + self.channels

    @property
    def blocks(self) -> int:
        """Blocks per multiprocessor, as limited by shared memory and registers.

        With 16-bit types 64 registers do; keys of 8 bytes need more, and so do the sums of a ring
        of planes.
        """
        registers = 64 if self.depth[0] == 1 and self.key_bytes == 4 else 112
        return blocks_held(self.threads, registers, self.shared_bytes)


class PoolLines:
    """bwd from the input, the kernels and strides of ``WINDOWS``."""

    name = "pool_lines"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.source is None:
            return "the indices are given"
        if work.dtype not in CHANNELS:
            return f"{work.dtype}"
        if work.dilated:
            return "dilated"
        same = work.kernel[1] == work.kernel[2] and work.stride[1] == work.stride[2]
        window = work.kernel[0], work.stride[0], work.kernel[1], work.stride[1]
        if not same or window not in WINDOWS:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if not work.x.channels_last and not is_flat(work):
            return "channels first, with a stride or a depth: copies to channels last are faster"
        if work.kernel[0] == 1 and (work.pad[0] != 0 or work.input[0] != work.output[0]):
            return "padding along D"
        if image_elements(work) >= 2**31:
            return "an image of more than 2^31 elements"
        shape = _shape(work)
        reason = device.why_not_shared(shape.shared_bytes)
        if reason is not None:
            return reason
        if work.batch * prod(_tiles(work, shape, device)) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        if work.source is None or work.y is None:
            raise ValueError("a pooling's gradient without its input")
        shape = _shape(work)
        planes = _planes(work, shape, device)
        tiles = _tiles(work, shape, device)
        args = LineArgs()
        fill_strides(args, work, 2)
        args.channels, args.channel_tiles = work.channels, tiles[1]
        args.x_size[:], args.y_size[:], args.pad[:] = work.input, work.output, work.pad
        args.planes = planes
        args.tiles[:] = tiles[0], tiles[2], tiles[3]
        if not shape.box.pad:
            first = [ceil_div(pad - shape.kernel + 1, shape.stride) for pad in work.pad[1:]]
            args.window_offset[:] = first
            args.box_offset[:] = [
                window * shape.stride - pad for window, pad in zip(first, work.pad[1:], strict=True)
            ]
        launch = Launch(
            _instance(work.dtype, shape),
            (work.batch * prod(tiles), 1, 1),
            (shape.threads, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
            shape.shared_bytes,
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        found = []
        for depth, depth_stride, kernel, stride in WINDOWS:
            boxes = [Box.tiled(kernel, stride, depth)]
            if stride == 1 and kernel % 2:
                boxes += [Box.full(lines, kernel) for lines in FULL]
            orders = (False, True) if (depth, stride) == (1, 1) else (False,)
            for dtype in CHANNELS:
                for first in orders:
                    found += [
                        _instance(
                            dtype,
                            Shape(
                                (depth, depth_stride),
                                kernel,
                                stride,
                                box,
                                _channels(dtype, depth, box),
                                _key_bytes(dtype),
                                first,
                            ),
                        )
                        for box in boxes
                    ]
        return found


def blocks_held(threads: int, registers: int, shared_bytes: int) -> int:
    """Return the blocks of a multiprocessor for given registers of a thread."""
    by_shared = SHARED_OF_MULTIPROCESSOR // (shared_bytes + 1024)
    return max(1, min(by_shared, REGISTERS // (threads * registers)))


def is_flat(work: PoolWork) -> bool:
    """Whether windows have stride 1 and no depth: channels-first rows are then read once."""
    return work.kernel[0] == 1 and work.stride[1:] == (1, 1)


def _channels(dtype: DType, depth: int, box: Box) -> int:
    """Return the channels of a block; twice as many if only one block fits a multiprocessor."""
    longest = box.lines == box.tile == FULL[-1] and depth == 1 and dtype.itemsize == 2
    return CHANNELS[dtype] * (2 if longest else 1)


def _key_bytes(dtype: DType) -> int:
    return 4 if dtype.itemsize == 2 else 8


def _shape(work: PoolWork) -> Shape:
    kernel, stride = work.kernel[1], work.stride[1]
    extent = max(work.input[1:])
    whole = (
        stride == 1
        and kernel % 2 == 1
        and work.pad[1:] == ((kernel - 1) // 2,) * 2
        and work.output[1:] == work.input[1:]
        and extent <= FULL[-1]
    )
    box = Box.tiled(kernel, stride, work.kernel[0])
    if whole:
        box = Box.full(next(lines for lines in FULL if lines >= extent), kernel)
    return Shape(
        (work.kernel[0], work.stride[0]),
        kernel,
        stride,
        box,
        _channels(work.dtype, work.kernel[0], box),
        _key_bytes(work.dtype),
        not work.x.channels_last,
    )


def _planes(work: PoolWork, shape: Shape, device: CudaDevice) -> int:
    """Return the planes of the input that a block owns: all, if that keeps the device busy."""
    if work.kernel[0] == 1:
        return 1
    most = 65535 // shape.box.lines**2 - 2 * work.kernel[0]
    others = work.batch * prod(_flat_tiles(work, shape))
    parts = max(1, round(0.9 * device.multiprocessors / others))
    return max(1, min(most, ceil_div(work.input[0], parts)))


def _flat_tiles(work: PoolWork, shape: Shape) -> Size3:
    return (
        ceil_div(work.channels, shape.channels),
        ceil_div(work.input[1], shape.box.tile),
        ceil_div(work.input[2], shape.box.tile),
    )


def _tiles(work: PoolWork, shape: Shape, device: CudaDevice) -> tuple[int, int, int, int]:
    """Return the tiles along D, channels, H and W."""
    return ceil_div(work.input[0], _planes(work, shape, device)), *_flat_tiles(work, shape)


def _instance(dtype: DType, shape: Shape) -> Instance:
    box = shape.box
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "CHANNELS": shape.channels,
        "FIRST": int(shape.first),
        "KERNEL_D": shape.depth[0],
        "STRIDE_D": shape.depth[1],
    }
    for letter in "HW":
        defines |= {
            f"KERNEL_{letter}": shape.kernel,
            f"STRIDE_{letter}": shape.stride,
            f"LINES_{letter}": box.lines,
            f"WINDOWS_{letter}": box.windows,
            f"TILE_{letter}": box.tile,
            f"PAD_{letter}": box.pad,
        }
    defines |= {"THREADS": shape.threads, "BLOCKS": shape.blocks}
    return Instance.of(
        "pool/pool_lines.cu",
        defines,
        with_shared_bytes(shape.shared_bytes),
    )
