"""Strided dgrad with few input channels, as a unit-stride convolution with phases as channels.

Position i = s*h + a of the input, where the phase a is less than the stride s, receives from output
o = h + d through tap a + pad - s*d. A unit-stride convolution over grad_output, with a channel per
phase a and input channel, therefore computes s^n positions of the input for each h. It fills a tile
of which a single phase would fill a fraction, and reads grad_output once rather than per phase. Its
weight is gathered from the original taps, with zeros where a phase has none; its result is
scattered into the input's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.first_windows import why_not_first
from convgrad_service.backends.cuda.kernels.layout.strided_copy import StridedCopy
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family, choose
from convgrad_service.plans.cuda.program import Clear, Fragment, Instance, Workspace, ceil_div
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Copy,
    CopyAxis,
    Operand,
    contiguous_strides,
)
from convgrad_service.problems.geometry import ConvShape

__all__ = ["PhaseChannels"]

# More would not fit into the columns of one tile, and each phase takes a copy of weights.
MOST_PHASES, MOST_CHANNELS = 8, 32
COPY_BOUNDS = 2
# Speed relative to first_data on an H200: in float32, 1.27x at 1152 terms (last layer of a DCGAN)
# and 0.56x at 3072 (R3D's stem), where most columns of a tile are padding; in 16-bit types, 0.76x
# to 1.04x.
FEW_TERMS = 2048


@dataclass(frozen=True, slots=True)
class _Line:
    """One dimension.

    Attributes
    ----------
    positions
        Positions of a phase.
    taps, pad
        Of the convolution of phases.
    phases
        For each phase, its first tap in the convolution of phases, its number of taps, and the
        original tap that the first one holds; the next holds the one ``stride`` lower.
    """

    stride: int
    positions: int
    taps: int
    pad: int
    phases: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, size: int, kernel: int, stride: int, pad: int) -> _Line:
        lows = [-((kernel - 1 - pad - a) // stride) for a in range(stride)]
        highs = [(a + pad) // stride for a in range(stride)]
        first = min(lows)
        phases = tuple(
            (low - first, max(0, high - low + 1), a + pad - stride * low)
            for a, (low, high) in enumerate(zip(lows, highs, strict=True))
        )
        return cls(stride, ceil_div(size, stride), max(highs) - first + 1, -first, phases)


class PhaseChannels:
    """bwd_data of a strided first layer, by the first of ``families`` that takes the convolution of
    phases.

    One of ``copies`` scatters the result. With ``few_terms``, work at which this was slower than
    the families after it is refused.
    """

    name = "phase_channels"

    def __init__(
        self,
        families: Sequence[Family[ConvWork]],
        copies: Sequence[Family[Copy]],
        *,
        few_terms: bool = False,
    ) -> None:
        self._families, self._copies, self._few_terms = families, copies, few_terms

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_first(work, device)
        if reason is not None:
            return reason
        phases = prod(work.stride)
        if not 1 < phases <= MOST_PHASES:
            return f"{phases} phases, not 2 to {MOST_PHASES}"
        if phases * work.in_channels > MOST_CHANNELS:
            return f"{phases} phases of {work.in_channels} channels are more than {MOST_CHANNELS}"
        if work.accumulate is not None or work.alpha != 1.0 or work.activation != "none":
            return "an epilogue"
        cut = sum(size % step != 0 for size, step in zip(work.input, work.stride, strict=True))
        if cut > COPY_BOUNDS:
            return f"{cut} dimensions that no whole number of strides fills"
        inner = _Phases(work).work
        terms = inner.in_channels * inner.taps
        if self._few_terms and (work.dtype is not DType.FLOAT32 or terms > FEW_TERMS):
            return f"{terms} products of {work.dtype} a result"
        reasons = [family.why_not(inner, device) for family in self._families]
        return None if None in reasons else "; ".join(map(str, reasons))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        phases = _Phases(work)
        chosen = choose(self._families, phases.work, device)
        inner = chosen.fragment
        clear = Clear(phases.weight.name, phases.weight.size_bytes)
        before = [StridedCopy().launches(copy, device) for copy in phases.copies_in()]
        after = choose(self._copies, phases.copy_out(), device).fragment
        return replace(
            inner,
            kernel=f"{self.name}_{inner.kernel}",
            steps=(
                clear,
                *(step for one in before for step in one.steps),
                *inner.steps,
                *after.steps,
            ),
            workspace=(*phases.workspace, *inner.workspace),
            expected_s=None,
            order=f"{chosen.family} {inner.order}",
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`. These are the instances of ``families``."""
        return [instance for family in self._families for instance in family.instances()]


class _Phases:
    """The convolution of phases, its buffers, and the copies before and after it."""

    def __init__(self, work: ConvWork) -> None:
        self._given = work
        self._lines = [
            _Line.of(*each)
            for each in zip(work.input, work.kernel, work.stride, work.pad, strict=True)
        ]
        self.channels = prod(work.stride) * work.in_channels
        lead = f"{work.prefix}phases_"
        dtype, result_dtype = work.dtype, work.result_dtype
        positions = tuple(line.positions for line in self._lines)
        taps = tuple(line.taps for line in self._lines)
        result = (work.batch, *positions, self.channels)
        weight = (self.channels, *taps, work.out_channels)
        self.result = Workspace(f"{lead}result", prod(result) * result_dtype.itemsize)
        self.weight = Workspace(f"{lead}weight", prod(weight) * dtype.itemsize)
        self.bias = Workspace(f"{lead}bias", self.channels * dtype.itemsize)
        n, d, h, w, c = contiguous_strides(result)
        k, t, r, s, one = contiguous_strides(weight)
        self._result = Operand(self.result.name, result_dtype, (n, self.channels, c, d, h, w))
        self._weight = Operand(self.weight.name, dtype, (prod(weight), k, one, t, r, s))

    @property
    def workspace(self) -> tuple[Workspace, ...]:
        bias = () if self._given.bias is None else (self.bias,)
        return (self.weight, *bias, self.result)

    @property
    def work(self) -> ConvWork:
        """The unit-stride fprop whose input is grad_output."""
        work, conv = self._given, self._given.conv
        lines = self._lines[-conv.ndim :]
        ones = (1,) * conv.ndim
        shape = ConvShape(
            batch=conv.batch,
            groups=1,
            in_channels=conv.out_channels,
            out_channels=self.channels,
            input_size=conv.output_size,
            kernel_size=tuple(line.taps for line in lines),
            output_size=tuple(line.positions for line in lines),
            stride=ones,
            padding=tuple(
                (line.pad, line.positions + line.taps - 1 - size - line.pad)
                for line, size in zip(lines, conv.output_size, strict=True)
            ),
            dilation=ones,
        )
        return replace(
            work,
            direction="fwd",
            conv=shape,
            x=work.y,
            w=self._weight,
            y=self._result,
            bias=None if work.bias is None else self.bias.name,
            follows=False,
            leads=False,
        )

    def copies_in(self) -> Iterator[Copy]:
        """Yield the copies of each phase's taps into the weight, and of the bias to each phase."""
        work = self._given
        source, target = work.w.strides, self._weight.strides
        channels = CopyAxis(work.in_channels, source[2], target[1])
        outputs = CopyAxis(work.out_channels, source[1], target[2])
        for number, phases in enumerate(product(*(line.phases for line in self._lines))):
            axes, start, place = [channels], 0, number * work.in_channels * target[1]
            for (first, count, tap), line, from_, to in zip(
                phases, self._lines, source[3:], target[3:], strict=True
            ):
                axes.append(CopyAxis(count, -line.stride * from_, to))
                start, place = start + tap * from_, place + first * to
            if all(axis.extent for axis in axes):
                yield Copy(
                    work.w.buffer,
                    self.weight.name,
                    work.dtype,
                    (*axes, outputs),
                    source_start=start,
                    target_start=place,
                )
        if work.bias is not None:
            count = work.in_channels
            each = CopyAxis(self.channels // count, 0, count), CopyAxis(count, 1, 1)
            yield Copy(work.bias, self.bias.name, work.dtype, each)

    def copy_out(self) -> Copy:
        """Return the copy of the phases to their positions, without those outside the input."""
        work, lines = self._given, self._lines
        source, target = self._result.strides, work.x.strides
        axes = [CopyAxis(work.batch, source[0], target[0])]
        bounds = []
        step = self.channels
        for line, size, from_, to in zip(lines, work.input, source[3:], target[3:], strict=True):
            step //= line.stride
            if line.positions * line.stride != size:
                bounds.append((len(axes), len(axes) + 1, size))
            axes.append(CopyAxis(line.positions, from_, line.stride * to))
            axes.append(CopyAxis(line.stride, step, to))
        axes.append(CopyAxis(work.in_channels, source[2], target[2]))
        return Copy(self.result.name, work.x.buffer, work.result_dtype, tuple(axes), tuple(bounds))
