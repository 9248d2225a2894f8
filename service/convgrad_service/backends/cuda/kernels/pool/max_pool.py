"""Max pooling forward, and backward from indices or, by computing indices first, from the input."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import Packed, pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS, linear_grid
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import (
    Check,
    Clear,
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
)
from convgrad_service.plans.cuda.works import Operand, PoolWork

__all__ = ["MaxPoolBackward", "MaxPoolForward"]

BLOCK = 256
BAD_INDEX = (
    "indices has an index that is out of its plane or outside its window; expected the indices of "
    "a max pooling of this geometry"
)


PoolArgs = structure("pool/max_pool.cuh", "PoolArgs")


class MaxPoolForward:
    """Max pooling forward of any size: maxima and, if requested, indices."""

    name = "max_pool_forward"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        return _too_many(work)

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        return Fragment(self.name, (_forward(work, work.x, work.y, work.indices),))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance("max_pool_forward", dtype, index) for dtype in FLOATING for index in INDEX
        ]


class MaxPoolBackward:
    """Max pooling backward of any size, as a gather over the windows that contain an element."""

    name = "max_pool_backward"

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        return _too_many(work)

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        if work.indices is not None:
            return self._from_indices(work, work.indices)
        if work.source is None:
            raise ValueError("a pooling's gradient has neither input nor indices")
        name = f"{work.prefix}indices"
        narrow = prod(work.input) <= 2**31
        indices = Operand(name, DType.INT32 if narrow else DType.INT64, work.y.strides)
        size_bytes = work.batch * work.channels * prod(work.output) * indices.dtype.itemsize
        steps = (
            _forward(work, work.source, None, indices),
            _backward(work, "max_pool_backward", indices, work.input),
        )
        return Fragment(f"{self.name}_input", steps, (Workspace(name, size_bytes),))

    def _from_indices(self, work: PoolWork, indices: Operand) -> Fragment:
        bad = f"{work.prefix}bad_index"
        steps: tuple[Step, ...] = (
            Clear(bad, 8),
            _backward(work, "check_indices", indices, work.output, bad),
            _backward(work, "max_pool_backward", indices, work.input),
        )
        return Fragment(
            f"{self.name}_indices", steps, (Workspace(bad, 8),), (Check(bad, BAD_INDEX),)
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            *MaxPoolForward().instances(),
            *(
                _instance(entry, dtype, index)
                for entry in ("max_pool_backward", "check_indices")
                for dtype in FLOATING
                for index in INDEX
            ),
        ]


def _instance(entry: str, dtype: DType, index: DType) -> Instance:
    source = (
        "pool/max_pool_forward.cu" if entry == "max_pool_forward" else "pool/max_pool_backward.cu"
    )
    return Instance(source, entry, (("ELEMENT", CUDA_TYPES[dtype]), ("INDEX", CUDA_TYPES[index])))


def _too_many(work: PoolWork) -> str | None:
    elements = work.batch * work.channels * max(prod(work.input), prod(work.output))
    if elements > MAX_BLOCKS * BLOCK:
        return f"{elements} elements are more than a grid can have"
    return None


def _args(work: PoolWork, lanes: Operand) -> Any:
    args = PoolArgs()
    args.batch, args.channels = work.batch, work.channels
    args.x_size[:], args.y_size[:] = work.input, work.output
    for name in ("kernel", "stride", "dilation", "pad"):
        getattr(args, name)[:] = getattr(work, name)
    args.lanes = lanes.channels_last
    return args


def _forward(work: PoolWork, x: Operand, y: Operand | None, indices: Operand | None) -> Launch:
    args = _args(work, x)
    args.x_stride[:] = x.strides
    if y is not None:
        args.y_stride[:] = y.strides
    if indices is not None:
        args.index_stride[:] = indices.strides
    index = DType.INT64 if indices is None else indices.dtype
    packed = pack(args, x=x, y=y, indices=indices)
    return _launch(_instance("max_pool_forward", work.dtype, index), work, work.output, packed)


def _backward(
    work: PoolWork, entry: str, indices: Operand, size: tuple[int, int, int], bad: str | None = None
) -> Launch:
    args = _args(work, work.x)
    args.grad_stride[:], args.grad_x_stride[:] = work.y.strides, work.x.strides
    args.index_stride[:] = indices.strides
    packed = pack(args, grad=work.y, grad_x=work.x, indices=indices, bad=bad)
    return _launch(_instance(entry, work.dtype, indices.dtype), work, size, packed)


def _launch(
    instance: Instance, work: PoolWork, size: tuple[int, int, int], arguments: Packed
) -> Launch:
    threads = work.batch * work.channels * prod(size)
    return Launch(instance, linear_grid(threads, BLOCK), (BLOCK, 1, 1), arguments)
