"""fprop or dgrad with few channels of the result by FMA, in any layout (few_gather.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, divider, gather_axis
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    MAX_PIXELS,
    Requirements,
    why_not_32bit_positions,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES, in_whole_chunks
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FewGather"]

THREADS = 256
# The most channels of a result, by instance; positions of a thread.
CHANNELS = (1, 2, 3, 4, 8)
PIXELS = (1, 4)
# The most channels of the result, and products of a sum: of true float32 channels first, and of
# others. With fewer channels of the source, a thread has too few loads in flight. On an H200, 28
# such layers take 0.23 to 1.03 of the time of dense kernels, col2im and hopper_first_data.
MOST = {True: (8, 432), False: (4, 160)}
MOST_OF_STRIDE_1 = 1152
# From so many channels of the source on, tensor cores take kernels of several columns.
MOST_OF_ROWS = 16
LEAST_SOURCES = 8
# Of several positions; registers bound it.
MOST_OF_SEVERAL = 4
MOST_PHASES = 8
MOST_SHARED_BYTES = 2**16

FewGatherArgs = structure("conv/few_gather.cuh", "FewGatherArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """Positions of a thread, and elements of the source per load."""

    pixels: int
    vector: int


class FewGather(Solver[ConvWork, Cut]):
    """fwd and bwd_data with at most 8 channels of the result."""

    name = "few_gather"

    def __init__(self, *, any_sum: bool = False) -> None:
        """Create the family; with ``any_sum`` also for sums of more products than it is fast for,
        in true float32."""
        self._any_sum = any_sum

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Family.why_not`."""
        if (reason := Requirements().why_not(work, device)) is not None:
            return reason
        channels = work.channels[1]
        if channels > CHANNELS[-1]:
            return f"{channels} channels of the result are more than {CHANNELS[-1]}"
        source = work.sides[0]
        if (reason := self.why_slow(work)) is not None:
            return reason
        if work.result_dtype is not work.dtype:
            return f"a result in {work.result_dtype}"
        axes = _axes(work)
        if max(len(axis.phases) for axis in axes) > MOST_PHASES:
            return f"more than {MOST_PHASES} phases along a dimension"
        if _positions(work, axes) > MAX_PIXELS:
            return f"more than {MAX_PIXELS} positions"
        extents = (work.batch, 1, work.channels[0], *work.sizes[0])
        last = in_whole_chunks(source, extents, 2)
        vector = CHUNK_BYTES // work.dtype.itemsize if last else 1
        many = _positions(work, axes) >= PIXELS[-1] * THREADS * device.multiprocessors
        cut = Cut(PIXELS[many and channels <= MOST_OF_SEVERAL], vector)
        if _shared_bytes(work, axes) > MOST_SHARED_BYTES:
            return f"weights take {_shared_bytes(work, axes)} bytes of shared memory"
        if _blocks(work, axes, cut) > MAX_BLOCKS:
            return "more tiles than one grid holds"
        return why_not_32bit_positions(work) or cut

    def why_slow(self, work: ConvWork) -> str | None:
        """Return why other families are expected to take less time, or None."""
        first = not work.sides[0].channels_last
        exact = work.dtype is DType.FLOAT32 and work.precision != "high" and first
        (most, products), (read, written) = MOST[exact], work.channels
        if work.direction == "fwd" and not exact:
            return "a forward pass that is not in true float32 channels first"
        if not exact and read >= MOST_OF_ROWS and work.kernel[2] > 1:
            return f"rows of {work.kernel[2]} taps of {read} channels: hopper_first_data"
        if work.direction == "bwd_data" and exact and max(work.stride) == 1:
            products = MOST_OF_STRIDE_1
        if written > most:
            return f"{written} channels of the result: tensor cores take less time"
        few = read >= LEAST_SOURCES and work.taps * read <= products
        if not few and not (exact and self._any_sum):
            return f"{work.taps} taps of {read} channels: tensor cores take less time"
        return None

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        source, result = work.sides
        axes = _axes(work)
        args = FewGatherArgs()
        args.source_stride[:] = (source.strides[0], *source.strides[2:])
        args.result_stride[:] = (result.strides[0], *result.strides[2:])
        _, k, c, *taps = work.w.strides
        args.weight_stride[:] = (k, c, *taps) if work.direction == "bwd_data" else (c, k, *taps)
        args.source_channels, args.result_channels = work.channels
        args.batch, args.activation = work.batch, ACTIVATIONS[work.activation]
        args.alpha, args.beta = work.alpha, work.beta
        for dim, axis in enumerate(axes):
            to = args.axis[dim]
            to.size, to.x_step, to.x_tap = axis.x_size, axis.x_step, axis.x_tap
            to.y_step, to.r_step, to.phases = axis.y_step, axis.r_step, len(axis.phases)
            for place, phase in enumerate(axis.phases):
                one = args.phase[place][dim]
                one.taps, one.r0, one.x0 = phase.taps, phase.r0, phase.x0
                one.y0, one.count = phase.y0, phase.count
                for field, value in (("by_taps", max(phase.taps, 1)), ("by_count", phase.count)):
                    by = getattr(one, field)
                    by.factor, by.shift = divider(value)
        pointers = {"source": source.buffer, "weight": work.w.buffer, "result": result.buffer}
        if work.accumulate is not None:
            pointers["accumulate"] = work.accumulate.buffer
        if work.bias is not None:
            pointers["bias"] = work.bias
        most = next(most for most in CHANNELS if most >= work.channels[1])
        launch = Launch(
            _instance(work.dtype, most, cut),
            (_blocks(work, axes, cut), 1, 1),
            (THREADS, 1, 1),
            pack(args, **pointers),
            _shared_bytes(work, axes),
        )
        return Fragment(f"{self.name}_{work.direction}", (launch,))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, most, Cut(pixels, vector))
            for dtype in DTYPES
            for most in CHANNELS
            for pixels in PIXELS[: 1 + (most <= MOST_OF_SEVERAL)]
            for vector in (1, CHUNK_BYTES // dtype.itemsize)
        ]


def _instance(dtype: DType, channels: int, cut: Cut) -> Instance:
    return Instance.of(
        "conv/few_gather.cu",
        ELEMENT=dtype,
        CHANNELS=channels,
        PIXELS=cut.pixels,
        VECTOR=cut.vector,
    )


def _axes(work: ConvWork) -> tuple[Axis, Axis, Axis]:
    return gather_axis(work, 0), gather_axis(work, 1), gather_axis(work, 2)


def _positions(work: ConvWork, axes: Iterable[Axis]) -> int:
    """Return the positions of the largest phase."""
    return work.batch * prod(max(phase.count for phase in axis.phases) for axis in axes)


def _blocks(work: ConvWork, axes: tuple[Axis, ...], cut: Cut) -> int:
    phases = prod(len(axis.phases) for axis in axes)
    return phases * ceil_div(_positions(work, axes), THREADS * cut.pixels)


def _shared_bytes(work: ConvWork, axes: Iterable[Axis]) -> int:
    """Return the bytes of the largest phase's weights."""
    most = next(most for most in CHANNELS if most >= work.channels[1])
    taps = prod(max(phase.taps for phase in axis.phases) for axis in axes)
    return taps * work.channels[0] * (4 if most == 3 else most) * 4
