"""A strided gradient of an input of few channels as a convolution whose channels are its phases.

Positions i = s*h + a of the input, a below the stride s, meet outputs o = h + d at taps
a + pad - s*d. So position h of a convolution of stride 1 over grad_output, with a channel for each
phase a and each channel of the input, gives s^n positions of the input at once: it fills a tile
where a phase alone would fill a fraction, and reads grad_output once and not for each phase. Its
weight is the phases' own, zero where a phase has no tap; its result is copied to where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

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

# More would no longer share one tile's columns, and each is a copy of its part of the weight.
MOST_PHASES, MOST_CHANNELS = 8, 32
COPY_BOUNDS = 2


@dataclass(frozen=True, slots=True)
class _Line:
    """One dimension: the positions of a phase, and for each phase its first place among the taps of
    the convolution of phases, how many it has, and its own tap there; the next one is ``stride``
    taps lower."""

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
    """bwd_data of a first layer with a stride, by the first of ``families`` that takes the
    convolution of phases; between ``copies``."""

    name = "phase_channels"

    def __init__(
        self, families: Sequence[Family[ConvWork]], copies: Sequence[Family[Copy]]
    ) -> None:
        self._families, self._copies = families, copies

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
        """See `Family.instances`: those of the other families."""
        return [instance for family in self._families for instance in family.instances()]


class _Phases:
    """The convolution of phases of a work, its buffers, and the copies around it."""

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
        """The convolution over grad_output, which is its input."""
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
        """Each phase's taps of the weight to their places, and the bias to each phase."""
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
        """The result's phases to their positions; those beyond the input are left away."""
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
