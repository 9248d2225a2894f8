"""Max pooling's gradient from its input: windows that do not overlap, channels last, or in rows of
vectors channels first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import SMALL, widths
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import PoolWork
from convgrad_service.problems.sizes import Size3

__all__ = ["PoolCells", "fill_strides", "image_elements"]

BLOCK = 128
# Kernels and strides known at compile time; channels first, others are left to other families.
WINDOWS: tuple[tuple[Size3, Size3], ...] = (
    ((1, 2, 2), (1, 2, 2)),
    ((2, 2, 2), (2, 2, 2)),
)
ANY = ((0, 0, 0), (0, 0, 0))
# Positions of a cell, which one thread writes.
MOST_POSITIONS = 256

CellArgs = structure("pool/pool_cells.cu", "CellArgs")


def fill_strides(args: Any, work: PoolWork, first: int) -> None:
    """Fill in the strides of N and of the axes from ``first`` on, of a gradient from the input."""
    for field, operand in (("x", work.x), ("grad", work.y)):
        strides = (operand.strides[0], *operand.strides[first:])
        getattr(args, f"{field}_stride")[:] = strides


def image_elements(work: PoolWork) -> int:
    """Return the end of the offsets in a channel of an image, of the largest tensor."""
    operands = [(work.x, work.input), (work.y, work.output)]
    return max(
        sum(stride * extent for stride, extent in zip(operand.strides[3:], size, strict=True))
        for operand, size in operands
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a thread computes, see ``pool_cells.cu``; a kernel and stride of 0 are any."""

    kernel: Size3
    stride: Size3
    along: bool
    width: int

    @classmethod
    def of(cls, work: PoolWork) -> _Shape | None:
        """Return None if there is no instance, channels first."""
        window = work.kernel, work.stride
        if work.dtype not in SMALL:
            window = ANY
        if work.x.channels_last:
            fitting = (w for w in _widths(work.dtype) if work.channels % w == 0)
            return cls(*(window if window in WINDOWS else ANY), False, next(fitting))
        if window in WINDOWS and not any(work.pad) and work.input[2] == 2 * work.output[2]:
            row = gcd(work.output[2], CHUNK_BYTES // 2 // work.dtype.itemsize)
            if row in _widths(work.dtype, along=True):
                return cls(*window, True, row)
        return None

    def cells(self, work: PoolWork) -> Size3:
        """Return the cells along each axis, with those past the last window."""
        sides = zip(work.input, work.pad, work.stride, strict=True)
        d, h, w = (ceil_div(size + pad, step) for size, pad, step in sides)
        return d, h, w // self.width if self.along else w

    def threads(self, work: PoolWork) -> int:
        vectors = work.channels // (1 if self.along else self.width)
        return work.batch * vectors * prod(self.cells(work))

    def instance(self, dtype: DType) -> Instance:
        defines = {"ELEMENT": dtype, "WIDTH": self.width, "ALONG": self.along}
        for name, values in (("KERNEL", self.kernel), ("STRIDE", self.stride)):
            letters = zip("DHW", values, strict=True)
            defines |= {f"{name}_{letter}": value for letter, value in letters}
        return Instance.of("pool/pool_cells.cu", **defines)


class PoolCells(Solver[PoolWork, _Shape]):
    """bwd from the input, kernels not larger than their strides."""

    name = "pool_cells"

    def solve(self, work: PoolWork, device: CudaDevice) -> _Shape | str:
        if any(kernel > step for kernel, step in zip(work.kernel, work.stride, strict=True)):
            return f"windows of {work.kernel} with stride {work.stride} overlap"
        if prod(work.stride) > MOST_POSITIONS:
            return f"cells of more than {MOST_POSITIONS} positions"
        if work.dilated:
            return "dilated"
        if any(pad < 0 for pad in work.pad):
            return "a piece of a larger problem"
        if image_elements(work) >= 2**31:
            return "an image of more than 2^31 elements"
        other = "channels first, other than adjacent windows of two positions in rows of vectors"
        return _Shape.of(work) or other

    def fragment(self, work: PoolWork, device: CudaDevice, shape: _Shape) -> Fragment:
        args = CellArgs()
        fill_strides(args, work, 2)
        args.threads = shape.threads(work)
        args.vectors = work.channels // (1 if shape.along else shape.width)
        args.x_size[:], args.y_size[:] = work.input, work.output
        args.cells[:] = shape.cells(work)
        args.kernel[:], args.stride[:], args.pad[:] = work.kernel, work.stride, work.pad
        launch = Launch(
            shape.instance(work.dtype),
            linear_grid(args.threads, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        shapes = [
            *((window, False) for window in (*WINDOWS, ANY)),
            *((window, True) for window in WINDOWS),
        ]
        return [
            _Shape(*window, along, width).instance(dtype)
            for window, along in shapes
            for dtype in FLOATING
            if dtype in SMALL or window == ANY
            for width in _widths(dtype, along=along)
        ]


def _widths(dtype: DType, *, along: bool = False) -> tuple[int, ...]:
    """Return the widths of threads. Along W, their input rows have 16 or 8 bytes."""
    if along:
        widest = CHUNK_BYTES // 2 // dtype.itemsize
        return tuple(width for width in (widest, widest // 2) if width * dtype.itemsize * 2 >= 8)
    return widths(dtype)
