"""1x1 fprop or dgrad with few channels of the source by FMA (few_sources.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import (
    MAX_GRID_YZ,
    MAX_PIXELS,
    Requirements,
    is_pointwise,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["FewSources"]

THREADS = 256
# The most channels of a source, by instance; of a result, those of a block with planes.
CHANNELS = (1, 2, 3, 4, 8)
BLOCK_CHANNELS, LEAST_BLOCK_CHANNELS = 64, 4
# Channels last; with eight, dense kernels take 0.6 to 1.05 of the time on an H200.
MOST_CHANNELS_LAST = 4
CHUNK_BYTES = 16
# Blocks of an SM, where there are enough pixels and channels.
BLOCKS = 8
# Fitted to an H200.
START_S, BYTES_S = 5e-6, 3e12

FewSourcesArgs = structure("conv/few_sources.cu", "FewSourcesArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """Whether tensors are planes, and elements of the result per store."""

    planes: bool
    vector: int


# In 16-bit types pointwise_gemm takes 0.45 to 0.8 of the time of most such layers, on an H200.
NEEDS = Requirements(dtypes=(DType.FLOAT32,))


class FewSources(Solver[ConvWork, Cut]):
    """1x1 fwd and bwd_data in float32 with stride 1 and at most 8 channels of the source."""

    name = "few_sources"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Family.why_not`."""
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if not is_pointwise(work):
            return "not 1x1 with stride 1"
        read, written = work.channels
        if read > CHANNELS[-1]:
            return f"{read} channels of the source are more than {CHANNELS[-1]}"
        if work.result_dtype is not work.dtype:
            return f"a result in {work.result_dtype}"
        source, result = (_pixel_stride(work, operand) for operand in work.sides)
        if source is None or result is None:
            return "pixels of an image that do not follow one another"
        if work.pixels * written > MAX_PIXELS:
            return f"more than {MAX_PIXELS} results"
        chunk = CHUNK_BYTES // work.dtype.itemsize
        if source == result == 1 and (read > 1 or written > 1):
            strides = [stride for one in work.sides for stride in (one.strides[0], one.strides[2])]
            aligned = all(size % chunk == 0 for size in (prod(work.input), *strides))
            if ceil_div(written, BLOCK_CHANNELS) > MAX_GRID_YZ:
                return f"{written} channels of the result"
            return Cut(True, chunk if aligned else 1)
        if read > MOST_CHANNELS_LAST:
            return f"{read} channels of the source, channels last"
        operand = work.sides[1]
        images = [prod(work.input) * pixel for pixel in (source, result)]
        whole = images == [one.strides[0] for one in work.sides]
        if operand.strides[2] != 1 or not (whole or work.batch == 1):
            return "neither planes nor contiguous channels of images one after another"
        return Cut(False, chunk if result % chunk == 0 and written % chunk == 0 else 1)

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        source, result = work.sides
        args = FewSourcesArgs()
        for field, operand in (("source_stride", source), ("result_stride", result)):
            pixel = _pixel_stride(work, operand)
            getattr(args, field)[:] = (operand.strides[0], operand.strides[2], pixel or 1)
        _, k, c, *_ = work.w.strides
        args.weight_stride[:] = (k, c) if work.direction == "bwd_data" else (c, k)
        args.source_channels, args.result_channels = read, written = work.channels
        args.pixels, args.images = prod(work.input), work.batch
        args.activation, args.alpha, args.beta = ACTIVATIONS[work.activation], work.alpha, work.beta
        most = next(most for most in CHANNELS if most >= read)
        per = (args.pixels if cut.planes else written) // cut.vector
        args.by_image.factor, args.by_image.shift = divider(per)
        if cut.planes:
            args.items = work.batch * per
            across = ceil_div(args.items, THREADS)
            each = ceil_div(written, ceil_div(BLOCKS * device.multiprocessors, across))
            args.channels = min(written, BLOCK_CHANNELS, max(each, LEAST_BLOCK_CHANNELS))
            grid = (across, ceil_div(written, args.channels), 1)
            shared = args.channels * most * 4
        else:
            args.items = work.pixels * per
            least = ceil_div(per, THREADS)
            blocks = max(least, min(ceil_div(args.items, THREADS), BLOCKS * device.multiprocessors))
            grid, shared = (blocks, 1, 1), 0
        packed = pack(
            args,
            source=source,
            weight=work.w,
            result=result,
            accumulate=work.accumulate,
            bias=work.bias,
        )
        launch = Launch(_instance(work.dtype, most, cut), grid, (THREADS, 1, 1), packed, shared)
        expected_s = START_S + work.elements * work.dtype.itemsize / BYTES_S
        return Fragment(f"{self.name}_{work.direction}", (launch,), expected_s=expected_s)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, most, Cut(planes, vector))
            for dtype in NEEDS.dtypes
            for most in CHANNELS
            for planes in (False, True)
            for vector in (1, CHUNK_BYTES // dtype.itemsize)
            if planes or most <= MOST_CHANNELS_LAST
        ]


def _pixel_stride(work: ConvWork, operand: Operand) -> int | None:
    """Return the distance of an image's pixels, or None if they have no single one."""
    found = None
    inner = 1
    for axis in (5, 4, 3):
        extent = work.input[axis - 3]
        if extent > 1:
            if operand.strides[axis] % inner:
                return None
            if found is None:
                found = operand.strides[axis] // inner
            elif operand.strides[axis] != found * inner:
                return None
        inner *= extent
    return 1 if found is None else found


def _instance(dtype: DType, channels: int, cut: Cut) -> Instance:
    return Instance.of(
        "conv/few_sources.cu",
        ELEMENT=dtype,
        CHANNELS=channels,
        PLANES=cut.planes,
        VECTOR=cut.vector,
    )
