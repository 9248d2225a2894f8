"""Max pooling forward, several channels per thread."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS, linear_grid
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES, in_whole_chunks
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import Operand, PoolWork

__all__ = ["PoolWindows"]

BLOCK = 128
# Sums of a position, a pad and a dilation below this fit in 32 bits.
FAR = 2**29


WindowsArgs = structure("pool/pool_windows.cu", "WindowsArgs")


class PoolWindows:
    """Max pooling forward of images with 32-bit offsets."""

    name = "pool_windows"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reach = max(
            sum(stride * extent for stride, extent in zip(operand.strides[3:], size, strict=True))
            for operand, size in ((work.x, work.input), (work.y, work.output))
        )
        if max(reach, prod(work.input)) >= 2**31:
            return "an image of more than 2^31 elements"
        if max(*work.dilation, *work.pad, *work.stride) >= FAR:
            return f"a step, a pad or a dilation of {FAR} or more"
        if ceil_div(_threads(work), BLOCK) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        return Fragment(self.name, (pool_windows(work, work.x, work.y, work.indices),))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, index, vector)
            for dtype in FLOATING
            for index in INDEX
            for vector in (CHUNK_BYTES // dtype.itemsize, 1)
        ]


def pool_windows(work: PoolWork, x: Operand, y: Operand | None, indices: Operand | None) -> Launch:
    """Return the launch that computes maxima, indices, or both, of the input ``x``."""
    args = WindowsArgs()
    for field, operand in (("x", x), ("y", y), ("index", indices)):
        if operand is not None:
            n, _, *rest = operand.strides
            getattr(args, f"{field}_stride")[:] = (n, *rest)
    vector = _vector(work, x, y, indices)
    args.threads, args.vectors = _threads(work, vector), work.channels // vector
    args.x_size[:], args.y_size[:] = work.input, work.output
    for name in ("kernel", "stride", "dilation", "pad"):
        getattr(args, name)[:] = getattr(work, name)
    args.lanes = x.channels_last
    index = DType.INT64 if indices is None else indices.dtype
    return Launch(
        _instance(work.dtype, index, vector),
        linear_grid(args.threads, BLOCK),
        (BLOCK, 1, 1),
        pack(args, x=x, y=y, indices=indices),
    )


def _vector(work: PoolWork, x: Operand, y: Operand | None, indices: Operand | None) -> int:
    """Return the channels of a thread: 16 bytes of them, or one."""
    vector = CHUNK_BYTES // work.dtype.itemsize
    sides = [(x, work.input), (y, work.output), (indices, work.output)]
    whole = work.channels % vector == 0 and all(
        in_whole_chunks(operand, (work.batch, 1, work.channels, *size), 2)
        for operand, size in sides
        if operand is not None
    )
    return vector if whole else 1


def _threads(work: PoolWork, vector: int = 1) -> int:
    return work.batch * (work.channels // vector) * prod(work.output)


def _instance(dtype: DType, index: DType, vector: int) -> Instance:
    defines = (
        ("ELEMENT", CUDA_TYPES[dtype]),
        ("INDEX", CUDA_TYPES[index]),
        ("VECTOR", str(vector)),
    )
    return Instance("pool/pool_windows.cu", "pool_windows", defines)
