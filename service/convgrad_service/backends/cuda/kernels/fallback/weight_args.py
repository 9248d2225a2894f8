"""The argument of the weight-gradient kernels, and split-K over pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import Packed, fill, pack
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.split_sum import split_sum, split_sum_instances
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice, sum_dtype
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["WeightFallback", "fill_wgrad"]

BLOCK = 256
# Least pixels of a split, so that summing them outweighs adding the partial sums.
LEAST_PIXELS = 256
# Blocks of 256 threads per multiprocessor, which has 2,048 threads.
BLOCKS_PER_MULTIPROCESSOR = 8
MOST_SPLITS = 128
# The most memory for partial sums, unless the caller requests more splits.
PARTIAL_BYTES = 256 * 2**20

DTYPE_PAIRS: Sequence[tuple[DType, DType]] = (
    *((dtype, dtype) for dtype in FLOATING),
    (DType.FLOAT16, DType.FLOAT32),
    (DType.BFLOAT16, DType.FLOAT32),
)
"""Types read and written: equal, or float32 from 16 bits."""


WeightArgs = structure("fallback/weight_args.cuh", "WeightArgs")


@dataclass(frozen=True, slots=True)
class Split:
    """``count`` ranges of ``pixels`` each; the last may be shorter."""

    count: int
    pixels: int


def split_pixels(work: ConvWork, blocks: int, device: CudaDevice) -> Split:
    """Return how to split the pixels so that ``blocks`` blocks per split fill the device.

    Follows from the problem and the device model alone, so equal requests give equal bits.
    """
    room = PARTIAL_BYTES // _partial_bytes(work)
    if work.split_k is None:
        wanted = ceil_div(BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors, blocks)
        count = min(wanted, room, MOST_SPLITS, work.pixels // LEAST_PIXELS)
    else:
        count = min(work.split_k, work.pixels, max(room, MOST_SPLITS), MAX_BLOCKS // blocks)
    pixels = ceil_div(work.pixels, max(1, count))
    return Split(ceil_div(work.pixels, pixels), pixels)


def _partial_bytes(work: ConvWork) -> int:
    elements = work.groups * work.out_channels * work.in_channels * work.taps
    return elements * sum_dtype(work.dtype).itemsize


def fill_wgrad(args: Any, work: ConvWork, x: Operand, y: Operand) -> None:
    """Fill in the kernel parameters of any wgrad that reads ``x`` and ``y``."""
    args.x_stride[:], args.y_stride[:], args.w_stride[:] = x.strides, y.strides, work.w.strides
    fill(args, work, "alpha", "beta", "batch", "groups", "in_channels", "out_channels")
    args.x_size[:], args.y_size[:] = work.input, work.output
    fill(args, work, "kernel", "stride", "dilation", "pad")


def weight_args(work: ConvWork, split: Split) -> Packed:
    """Return the kernels' argument for a bwd_weight."""
    args = WeightArgs()
    fill_wgrad(args, work, work.x, work.y)
    if work.accumulate is not None:
        args.accumulate_stride[:] = work.accumulate.strides
    args.pixels, args.split_pixels, args.splits = work.pixels, split.pixels, split.count
    args.x_lanes, args.y_lanes = work.x.channels_last, work.y.channels_last
    return pack(
        args,
        x=work.x,
        y=work.y,
        w=work.w,
        accumulate=work.accumulate,
        partials=_partials(work) if split.count > 1 else None,
    )


def finish_split(work: ConvWork, split: Split) -> tuple[tuple[Launch, ...], tuple[Workspace, ...]]:
    """Return the launch that adds the partial sums, and their workspace; nothing for one split."""
    if split.count == 1:
        return (), ()
    extents = (work.groups, work.out_channels, work.in_channels, *work.kernel)
    launch = split_sum(
        _partials(work),
        split.count,
        extents,
        work.w,
        sum_dtype(work.dtype),
        accumulate=work.accumulate,
        alpha=work.alpha,
        beta=work.beta,
    )
    return (launch,), (Workspace(_partials(work), split.count * _partial_bytes(work)),)


class WeightFallback(Solver[ConvWork, int]):
    """What `WeightDirect` and `WeightTile` share: split-K over blocks of 256 threads.

    A configuration is the blocks of one split.
    """

    def fragment(self, work: ConvWork, device: CudaDevice, blocks: int) -> Fragment:
        split = split_pixels(work, blocks, device)
        launch = Launch(
            self._instance(work.dtype, work.result_dtype),
            (blocks * split.count, 1, 1),
            (BLOCK, 1, 1),
            weight_args(work, split),
        )
        after, workspace = finish_split(work, split)
        return Fragment(f"{self.name}/{split.count}", (launch, *after), workspace)

    def instances(self) -> Iterable[Instance]:
        return [*(self._instance(*pair) for pair in DTYPE_PAIRS), *split_sum_instances()]

    def _instance(self, dtype: DType, result: DType) -> Instance:
        return Instance.of(f"fallback/{self.name}.cu", ELEMENT=dtype, RESULT=result)


def _partials(work: ConvWork) -> str:
    return f"{work.prefix}partials"
