"""fprop or dgrad with few channels of the result by FMA, in any layout (few_gather.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, divider, gather_axes
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
# Of several positions; registers bound it.
MOST_OF_SEVERAL = 4
MOST_PHASES = 8
# Fitted to an H200, in clocks of an SM for a warp: a load of the source, channels first and last, a
# product, a load of weights, a row of taps, a position and a store; and a thread's wait for DEPTH
# loads.
LOAD, LOAD_LAST, PRODUCT, WEIGHTS, TAP, POSITION, STORE = 1.8, 6.5, 0.29, 0.9, 0.4, 130.0, 7.5
DEPTH, WAIT = 16, 1330
START_S, CLOCKS_PER_S, BYTES_S = 8e-6, 1.7e9, 3.3e12
MOST_SHARED_BYTES = 2**16

FewGatherArgs = structure("conv/few_gather.cu", "FewGatherArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """Positions of a thread, and elements of the source per load."""

    pixels: int
    vector: int


class FewGather(Solver[ConvWork, Cut]):
    """fwd and bwd_data with at most 8 channels of the result."""

    name = "few_gather"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Family.why_not`."""
        if (reason := Requirements().why_not(work, device)) is not None:
            return reason
        channels = work.channels[1]
        if channels > CHANNELS[-1]:
            return f"{channels} channels of the result are more than {CHANNELS[-1]}"
        source = work.sides[0]
        if work.result_dtype is not work.dtype:
            return f"a result in {work.result_dtype}"
        axes = gather_axes(work)
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

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        source, result = work.sides
        axes = gather_axes(work)
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
                one.by_taps, one.by_count = divider(max(phase.taps, 1)), divider(phase.count)
        launch = Launch(
            _instance(work.dtype, _most(work), cut),
            (_blocks(work, axes, cut), 1, 1),
            (THREADS, 1, 1),
            pack(
                args,
                source=source,
                weight=work.w,
                result=result,
                accumulate=work.accumulate,
                bias=work.bias,
            ),
            _shared_bytes(work, axes),
        )
        expected_s = _expected_s(work, axes, cut, device)
        return Fragment(f"{self.name}_{work.direction}", (launch,), expected_s=expected_s)

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


def _positions(work: ConvWork, axes: Iterable[Axis]) -> int:
    """Return the positions of the largest phase."""
    return work.batch * prod(max(phase.count for phase in axis.phases) for axis in axes)


def _blocks(work: ConvWork, axes: tuple[Axis, ...], cut: Cut) -> int:
    phases = prod(len(axis.phases) for axis in axes)
    return phases * ceil_div(_positions(work, axes), THREADS * cut.pixels)


def _expected_s(work: ConvWork, axes: tuple[Axis, ...], cut: Cut, device: CudaDevice) -> float:
    """Return the seconds that the launch should take."""
    read, most = work.channels[0], _most(work)
    taps = prod(sum(phase.taps for phase in axis.phases) for axis in axes)
    phases = prod(len(axis.phases) for axis in axes)
    positions = _positions(work, axes) / 32 / device.multiprocessors
    # Of a warp's position in all phases: loads of the source, whose lanes are apart channels last,
    # products, and weights, which positions of a thread share.
    loads = LOAD_LAST if cut.vector > 1 or work.sides[0].channels_last else LOAD
    if cut.vector > 1:
        loads *= work.dtype.itemsize / 4
    of_tap = read * (loads + most * PRODUCT + (1 + most / 4) * WEIGHTS / cut.pixels) + TAP
    clocks = positions * (taps * of_tap + phases * (POSITION + most * STORE))
    # A thread's own chain of loads.
    longest = prod(max(phase.taps for phase in axis.phases) for axis in axes)
    alone = longest * (ceil_div(read, DEPTH) * WAIT * cut.pixels + TAP) + WAIT
    moved = work.elements * work.dtype.itemsize / BYTES_S
    return START_S + max(max(clocks, alone) / CLOCKS_PER_S, moved)


def _most(work: ConvWork) -> int:
    return next(most for most in CHANNELS if most >= work.channels[1])


def _shared_bytes(work: ConvWork, axes: Iterable[Axis]) -> int:
    """Return the bytes of the largest phase's weights."""
    most = _most(work)
    taps = prod(max(phase.taps for phase in axis.phases) for axis in axes)
    return taps * work.channels[0] * (4 if most == 3 else most) * 4
