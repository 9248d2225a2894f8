"""Max pooling's gradient from its input: windows that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS, linear_grid
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import PoolWork, Size3

__all__ = ["PoolCells", "fill_strides", "image_elements"]

BLOCK = 128
VECTOR_BYTES = 16

# Kernels and strides.
WINDOWS: tuple[tuple[Size3, Size3], ...] = (
    ((1, 2, 2), (1, 2, 2)),
    ((1, 3, 3), (1, 3, 3)),
    ((2, 2, 2), (2, 2, 2)),
    ((1, 1, 1), (1, 2, 2)),
)


CellArgs = structure("pool/pool_cells.cu", "CellArgs")


def fill_strides(args: Any, work: PoolWork, first: int) -> None:
    """Fill in the strides of N and of the axes from ``first`` on, of a gradient from the input."""
    for field, operand in (("x", work.source), ("grad", work.y), ("grad_x", work.x)):
        if operand is not None:
            strides = (operand.strides[0], *operand.strides[first:])
            getattr(args, f"{field}_stride")[:] = strides


def image_elements(work: PoolWork) -> int:
    """Return the end of the offsets in a channel of an image, of the largest tensor."""
    operands = [(work.x, work.input), (work.source, work.input), (work.y, work.output)]
    return max(
        sum(stride * extent for stride, extent in zip(operand.strides[3:], size, strict=True))
        for operand, size in operands
        if operand is not None
    )


class PoolCells:
    """bwd from the input, kernels not larger than their strides."""

    name = "pool_cells"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.source is None:
            return "the indices are given"
        if (work.kernel, work.stride) not in WINDOWS:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if work.dilated:
            return "dilated"
        if any(pad < 0 for pad in work.pad):
            return "a piece of a larger problem"
        if image_elements(work) >= 2**31:
            return "an image of more than 2^31 elements"
        if _blocks(work) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        if work.source is None or work.y is None:
            raise ValueError("a pooling's gradient without its input")
        vector, cells = _vector(work), _cells(work)
        args = CellArgs()
        fill_strides(args, work, 2)
        args.batch, args.vectors = work.batch, work.channels // vector
        args.x_size[:], args.y_size[:] = work.input, work.output
        args.cells[:], args.pad[:] = cells, work.pad
        args.lanes = work.x.channels_last
        launch = Launch(
            _instance(work.dtype, vector, work.kernel, work.stride),
            (_blocks(work), 1, 1),
            (BLOCK, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, vector, kernel, stride)
            for kernel, stride in WINDOWS
            for dtype in FLOATING
            for vector in (VECTOR_BYTES // dtype.itemsize, 1)
        ]


def _vector(work: PoolWork) -> int:
    vector = VECTOR_BYTES // work.dtype.itemsize
    return vector if work.x.channels_last and work.channels % vector == 0 else 1


def _cells(work: PoolWork) -> Size3:
    d, h, w = (
        ceil_div(size + pad, stride)
        for size, pad, stride in zip(work.input, work.pad, work.stride, strict=True)
    )
    return d, h, w


def _blocks(work: PoolWork) -> int:
    threads = work.batch * (work.channels // _vector(work)) * prod(_cells(work))
    return linear_grid(threads, BLOCK)[0]


def _instance(dtype: DType, vector: int, kernel: Size3, stride: Size3) -> Instance:
    defines = {"ELEMENT": CUDA_TYPES[dtype], "VECTOR": vector}
    for name, values in (("KERNEL", kernel), ("STRIDE", stride)):
        defines |= {f"{name}_{letter}": value for letter, value in zip("DHW", values, strict=True)}
    return Instance.of("pool/pool_cells.cu", defines)
