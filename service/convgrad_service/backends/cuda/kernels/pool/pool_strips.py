"""Max pooling's gradient from its input: overlapping windows, a word of channels per thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import (
    CudaDevice,
    architectures_before,
    architectures_since,
    with_shared_bytes,
)
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div, macros_of
from convgrad_service.plans.cuda.works import PoolWork

__all__ = ["PoolStrips"]

BLOCK, LANES = 128, 32
# Planes of a block, and devices before whose capability keys of 16 bits are compared one by one,
# which takes more registers.
MOST_PLANES = 8
IN_PAIRS, OLDER_ROWS = (9, 0), 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What a thread computes: ``rows`` of its own, of windows of ``kernel`` positions along H and W
    and ``depth`` along D, where the padding along H is ``phase`` modulo the stride.

    More rows share more loads, and need more registers. ``blocks`` are those of a multiprocessor.
    """

    kernel: int
    stride: int
    depth: int
    rows: int
    blocks: int
    phase: int = 0

    @property
    def windows(self) -> int:
        """Rows of windows that overlap a thread's own rows."""
        first = (self.kernel - 1 - self.phase) // self.stride
        return (self.rows - 1 + self.phase) // self.stride + first + 1

    def shared_bytes(self, warps: int = MOST_PLANES) -> int:
        if self.depth == 1:
            return 0
        return 2 * (warps + 2 * (self.depth - 1)) * self.windows * LANES * 8

    def instance(self, dtype: DType, per: int) -> Instance:
        architectures = with_shared_bytes(self.shared_bytes())
        if self.depth > 1:
            older = self.rows == OLDER_ROWS
            known = architectures_before(IN_PAIRS) if older else architectures_since(IN_PAIRS)
            architectures = tuple(name for name in architectures if name in known)
        return Instance.of(
            "pool/pool_strips.cu",
            architectures,
            ELEMENT=dtype,
            PER=per,
            **macros_of(self, "kernel", "stride", "depth", "phase", "rows", "blocks"),
            MOST_PLANES=MOST_PLANES,
        )


# By channels in a word.
SHAPES: Mapping[int, tuple[Shape, ...]] = {
    2: (
        Shape(2, 1, 1, rows=8, blocks=3),
        Shape(3, 1, 1, rows=7, blocks=3),
        Shape(3, 2, 1, rows=6, blocks=4),
        Shape(3, 1, 3, rows=7, blocks=1),
        Shape(3, 2, 3, rows=8, blocks=1),
    ),
    1: (
        Shape(2, 1, 1, rows=8, blocks=4),
        Shape(3, 1, 1, rows=8, blocks=3),
        Shape(3, 2, 1, rows=8, blocks=4),
        Shape(3, 1, 3, rows=7, blocks=1),
        Shape(3, 2, 3, rows=8, blocks=1),
    ),
}


class PoolStrips(Solver[PoolWork, Shape]):
    """bwd from the input, channels last, the windows of ``SHAPES``."""

    name = "pool_strips"

    def solve(self, work: PoolWork, device: CudaDevice) -> Shape | str:
        if work.dtype not in DTYPES:
            return f"{work.dtype}"
        if work.dilated:
            return "dilated"
        if not all(operand.channels_last for operand in (work.source, work.x, work.y)):
            return "the channels are not contiguous"
        shape = self._shape(work, device)
        if shape is None:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if image_elements(work) * work.dtype.itemsize >= 2**31:
            return "an image of more than 2^31 bytes"
        if shape.depth > 1:
            strips = _Strips(work, shape)
            if strips.centre < 0:
                return "windows centred before the first plane"
            if strips.words < LANES // 2:
                return f"{work.channels} channels fill less than half of a warp"
        elif work.stride[0] != 1 or work.pad[0] != 0 or work.input[0] != work.output[0]:
            return "padding or a stride along D"
        return device.why_not_shared(shape.shared_bytes()) or shape

    def fragment(self, work: PoolWork, device: CudaDevice, shape: Shape) -> Fragment:
        strips, strip = _Strips(work, shape), _strip(work, shape, device)
        args = StripArgs()
        fill_strides(args, work, 3)
        args.words, args.groups = strips.words, ceil_div(strips.words, LANES)
        args.x_size[:], args.y_size[:], args.pad[:] = work.input, work.output, work.pad[1:]
        args.planes, args.halo = strips.planes, strips.halo
        args.plane_step, args.centre = work.stride[0], strips.centre
        args.stacks, args.tiles = strips.stacks, strips.tiles
        args.strip, args.strips = strip, ceil_div(work.input[2], strip)
        args.threads = strips.lines * args.strips
        warps = strips.planes + 2 * strips.halo
        flat = shape.depth == 1
        launch = Launch(
            shape.instance(work.dtype, _channels_per_word(work)),
            linear_grid(args.threads, BLOCK) if flat else (args.threads, 1, 1),
            (BLOCK if flat else LANES * warps, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
            shape.shared_bytes(warps),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        found: dict[Instance, None] = {}
        for dtype in DTYPES:
            for per in {1, 4 // dtype.itemsize}:
                for shape in SHAPES[per]:
                    for phase in range(shape.stride):
                        for own in (shape, _older(shape)):
                            instance = replace(own, phase=phase).instance(dtype, per)
                            found[instance] = None
        return found

    def _shape(self, work: PoolWork, device: CudaDevice) -> Shape | None:
        depth, *kernel = work.kernel
        for shape in SHAPES[_channels_per_word(work)]:
            same = kernel == [shape.kernel] * 2 and work.stride[1:] == (shape.stride,) * 2
            if same and depth == shape.depth:
                own = _older(shape) if device.capability < IN_PAIRS else shape
                return replace(own, phase=work.pad[1] % shape.stride)
        return None


StripArgs = structure("pool/pool_strips.cu", "StripArgs")


def _channels_per_word(work: PoolWork) -> int:
    """Return the channels of a thread: as many as fill 32 bits, or one.

    Windows with a depth have a warp for each plane, which few channels do not fill.
    """
    per = 4 // work.dtype.itemsize
    fills = work.kernel[0] == 1 or work.channels >= per * LANES // 2
    return per if fills and work.channels % per == 0 else 1


def _older(shape: Shape) -> Shape:
    return replace(shape, rows=OLDER_ROWS) if shape.depth > 1 else shape


class _Strips:
    """How a work is divided among threads.

    Attributes
    ----------
    centre
        The middle plane of the first window along D.
    planes, halo
        The planes that a block owns, and those of halo on each side: none if all fit.
    lines
        The threads of one strip, of blocks' own planes.
    """

    def __init__(self, work: PoolWork, shape: Shape) -> None:
        depth = work.kernel[0]
        self.words = work.channels // _channels_per_word(work)
        self.centre = (depth - 1) // 2 - work.pad[0]
        # Planes of the input, and after it to the last middle one of a window.
        extent = max(work.input[0], self.centre + (work.output[0] - 1) * work.stride[0] + 1)
        self.planes, self.halo = extent, 0
        if depth == 1:
            self.planes = 1
        elif extent > MOST_PLANES:
            self.halo = depth - 1
            self.planes = MOST_PLANES - 2 * self.halo
        self.stacks = ceil_div(extent, self.planes)
        self.tiles = ceil_div(work.input[1], shape.rows)
        self.lines = work.batch * self.tiles
        if shape.depth == 1:
            self.lines *= work.input[0] * self.words
        else:
            self.lines *= self.stacks * ceil_div(self.words, LANES)


def _strip(work: PoolWork, shape: Shape, device: CudaDevice) -> int:
    """Return the columns of a strip.

    Few fill the last wave of blocks; many share fewer columns with the next strip.
    """
    together = device.multiprocessors * shape.blocks * (BLOCK if shape.depth == 1 else 1)
    lines, width = _Strips(work, shape).lines, work.input[2]
    # Columns that two strips read, and a strip's fixed cost, in columns.
    fixed = 2 * (shape.kernel - shape.stride) + (4 if shape.depth == 1 else 2)

    def columns(strips: int) -> int:
        return ceil_div(ceil_div(width, strips), shape.stride) * shape.stride

    def expected(strips: int) -> float:
        own = columns(strips)
        return ceil_div(lines * ceil_div(width, own), together) * (own + fixed)

    return columns(min(range(1, max(1, width // 4) + 1), key=expected))
