"""Max pooling's gradient from its input: adjacent windows of two positions, channels first."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS, linear_grid
from convgrad_service.backends.cuda.kernels.pool.pool_cells import fill_strides, image_elements
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import Operand, PoolWork, Size3

__all__ = ["PoolCellRows"]

BLOCK = 128
# Kernels, which are also the strides.
WINDOWS: tuple[Size3, ...] = ((1, 2, 2), (2, 2, 2))
# Windows of one thread: 16 bytes of a row of the input, or 8 if W is not a multiple of 16 bytes.
VECTORS = {2: (4, 2), 4: (2,), 8: (1,)}


CellRowArgs = structure("pool/pool_cell_rows.cu", "CellRowArgs")


class PoolCellRows:
    """bwd from the input, positions along W contiguous."""

    name = "pool_cell_rows"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.source is None:
            return "the indices are given"
        if work.kernel not in WINDOWS or work.stride != work.kernel:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if work.dilated:
            return "dilated"
        if any(work.pad):
            return "padded"
        if _vector(work) is None:
            return "no whole vectors along W"
        if image_elements(work) >= 2**31:
            return "an image of more than 2^31 elements"
        if ceil_div(_threads(work), BLOCK) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        vector = _vector(work)
        if work.source is None or vector is None:
            raise ValueError("a pooling's gradient without its input, or not in whole vectors")
        args = CellRowArgs()
        fill_strides(args, work, 2)
        args.threads, args.channels = _threads(work), work.channels
        args.x_size[:], args.y_size[:] = work.input, work.output
        args.cells[:] = _cells(work, vector)
        launch = Launch(
            _instance(work.dtype, vector, work.kernel),
            linear_grid(args.threads, BLOCK),
            (BLOCK, 1, 1),
            pack(args, x=work.source, grad=work.y, grad_x=work.x),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, vector, kernel)
            for kernel in WINDOWS
            for dtype in FLOATING
            for vector in VECTORS[dtype.itemsize]
        ]


def _vector(work: PoolWork) -> int | None:
    """Return the windows of one thread: the most that are aligned in every row."""
    if work.source is None or work.input[2] != 2 * work.output[2]:
        return None
    sides = ((work.source, 2), (work.x, 2), (work.y, 1))
    for vector in VECTORS[work.dtype.itemsize]:
        whole = work.output[2] % vector == 0
        if whole and all(_aligned(work, operand, vector * each) for operand, each in sides):
            return vector
    return None


def _aligned(work: PoolWork, operand: Operand, elements: int) -> bool:
    n, _, c, d, h, w = operand.strides
    extents = (work.batch, work.channels, *work.input[:2])
    return w == 1 and all(
        stride % elements == 0
        for stride, extent in zip((n, c, d, h), extents, strict=True)
        if extent > 1
    )


def _cells(work: PoolWork, vector: int) -> Size3:
    d, h, _ = (ceil_div(size, stride) for size, stride in zip(work.input, work.stride, strict=True))
    return d, h, work.output[2] // vector


def _threads(work: PoolWork) -> int:
    return work.batch * work.channels * prod(_cells(work, _vector(work) or 1))


def _instance(dtype: DType, vector: int, kernel: Size3) -> Instance:
    defines = (
        ("ELEMENT", CUDA_TYPES[dtype]),
        ("VECTOR", str(vector)),
        ("KERNEL_D", str(kernel[0])),
        ("KERNEL_H", str(kernel[1])),
    )
    return Instance("pool/pool_cell_rows.cu", "pool_cell_rows", defines)
