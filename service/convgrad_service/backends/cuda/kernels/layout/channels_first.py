"""Channels-first tensors through channels-last copies, padded if necessary.

A copy moves a tensor once at memory bandwidth, as these kernels do: the total is at most three
times the channels-last time. Channels-first kernels would share no loads between lanes along W, or
need a product for each tap. Tensors that are channels last are not copied, except for depthwise
convolutions whose pixels are not whole chunks of channels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, TypeVar

from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES, overlapping
from convgrad_service.backends.cuda.kernels.layout.strided_copy import padding_copy
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family, Solver, Work, choose
from convgrad_service.plans.cuda.program import (
    Fragment,
    Launch,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Copy,
    CopyAxis,
    FusedWork,
    Operand,
    PoolWork,
    contiguous_strides,
)
from convgrad_service.problems.sizes import Size3

__all__ = ["ConvThroughChannelsLast", "FusedThroughChannelsLast", "LastTensor", "LastWork"]
__all__ += ["PoolThroughChannelsLast", "ThroughChannelsLast"]

W = TypeVar("W", bound=Work)
CONTIGUOUS = "the channels are contiguous"
# Max pooling goes through copies if so many positions, those of a window and twice the windows of a
# position, are computed for each lane that a channel takes: so expensive is it without them.
POSITIONS_A_LANE, WINDOWS_COUNT, LANES = 40, 2, 32


@dataclass(frozen=True, slots=True)
class LastTensor:
    """An activation, and its channels-last form: itself, or a copy in a workspace."""

    given: Operand
    last: Operand
    extents: tuple[int, ...]  # N D H W, channels of all groups; of a weight K T R S C
    room: int  # channels of a pixel, with padding
    outer: int = 0  # the operands' axis of the first extent: N, or a weight's K

    @classmethod
    def of(
        cls,
        given: Operand,
        batch: int,
        size: Size3,
        groups: int,
        channels: int,
        buffer: str,
        pads: bool = False,
    ) -> LastTensor:
        """Make it from an activation with ``channels`` per group; a copy would be in ``buffer``.

        With ``pads``, pixels of the channels-last form are whole chunks of channels.
        """
        every = groups * channels
        extents = (batch, *size, every)
        chunk = CHUNK_BYTES // given.dtype.itemsize if pads else 1
        room = ceil_div(every, chunk) * chunk
        image, plane, row, pixel, _ = contiguous_strides((*extents[:-1], room))
        strides = (image, channels, 1, plane, row, pixel)
        last = Operand(buffer, given.dtype, strides, padded=room > every)
        stays = given.channels_last and room == every
        return cls(given, given if stays else last, extents, room)

    @property
    def copied(self) -> bool:
        return self.last is not self.given

    @property
    def workspace(self) -> Workspace:
        elements = prod(self.extents[:-1]) * self.room
        return Workspace(self.last.buffer, elements * self.given.dtype.itemsize)

    def copy(self, out: bool) -> Copy:
        """Return the copy out of the workspace, or into it."""
        first, second = (self.last, self.given) if out else (self.given, self.last)
        order = self.outer, 3, 4, 5, 2
        strides = ([one.strides[axis] for axis in order] for one in (first, second))
        *axes, last = (CopyAxis(*axis) for axis in zip(self.extents, *strides, strict=True))
        if not out and self.last.padded:
            last = replace(last, extent=self.room)
        axes.append(last)
        names = first.buffer, second.buffer
        return padding_copy(*names, self.given.dtype, axes, len(axes) - 1, self.extents[-1])


@dataclass(frozen=True, slots=True)
class LastWork(Generic[W]):
    """A work on channels-last tensors, which are by the names of its fields; one is the result."""

    work: W
    tensors: Mapping[str, LastTensor]
    written: str | None


class ThroughChannelsLast(Solver[W, LastWork[W]]):
    """A family of channels-last tensors, ``inner``, between copies.

    With ``_overlaps``, copies of the result overlap the end of the kernel before them.
    """

    _overlaps = False

    def __init__(self, inner: Family[W], copies: Sequence[Family[Copy]]) -> None:
        self.name = f"{inner.name}_through_channels_last"
        self._inner = inner
        self._copies = copies

    def solve(self, work: W, device: CudaDevice) -> LastWork[W] | str:
        last = self._last(work)
        return last if isinstance(last, str) else self._inner.why_not(last.work, device) or last

    def fragment(self, work: W, device: CudaDevice, last: LastWork[W]) -> Fragment:
        inner = self._inner.launches(last.work, device)
        copied = {name: tensor for name, tensor in last.tensors.items() if tensor.copied}
        before: list[Step] = []
        after: list[Step] = []
        for name, tensor in copied.items():
            out = name == last.written
            fragment = choose(self._copies, tensor.copy(out), device).fragment
            (after if out else before).extend(fragment.steps)
        if self._overlaps:
            after[:] = overlapping(after, device, first=isinstance(inner.steps[-1], Launch))
        return Fragment(
            f"{inner.kernel}_through_channels_last",
            (*before, *inner.steps, *after),
            (*(tensor.workspace for tensor in copied.values()), *inner.workspace),
            inner.checks,
            expected_s=inner.expected_s,
            order=inner.order,
        )

    @abstractmethod
    def _last(self, work: W) -> LastWork[W] | str:
        """Return the work on channels-last tensors, or why the family does not apply."""


class ConvThroughChannelsLast(ThroughChannelsLast[ConvWork]):
    """A grouped or depthwise convolution."""

    def _last(self, work: ConvWork) -> LastWork[ConvWork] | str:
        if work.groups == 1:
            return "one group"
        sides = (work.x, work.in_channels), (work.y, work.out_channels)
        if any(one.strides[1] != channels * one.strides[2] for one, channels in sides):
            return "groups are not contiguous"
        tensors = _activations(work)
        if not any(tensor.copied for tensor in tensors.values()):
            return CONTIGUOUS
        accumulate = tensors["accumulate"].last if "accumulate" in tensors else work.accumulate
        last = replace(work, x=tensors["x"].last, y=tensors["y"].last, accumulate=accumulate)
        return LastWork(last, tensors, {"fwd": "y", "bwd_data": "x"}.get(work.direction))


def _activations(work: ConvWork) -> dict[str, LastTensor]:
    """Return the activations by the work's field names."""
    sides = {
        "x": (work.x, work.in_channels, work.input),
        "y": (work.y, work.out_channels, work.output),
    }
    if work.accumulate is not None and work.direction == "bwd_data":
        sides["accumulate"] = (work.accumulate, work.in_channels, work.input)
    lead = f"{work.prefix}{work.direction}.last_"
    pads = work.groups > 1 and work.in_channels == 1
    return {
        name: LastTensor.of(given, work.batch, size, work.groups, channels, lead + name, pads)
        for name, (given, channels, size) in sides.items()
    }


class FusedThroughChannelsLast(ThroughChannelsLast[FusedWork]):
    """Two convolutions with the intermediate on chip."""

    def _last(self, work: FusedWork) -> LastWork[FusedWork] | str:
        first, second = work.first, work.second
        if first.x.channels_last and second.y.channels_last:
            return CONTIGUOUS
        x, y = _activations(first)["x"], _activations(second)["y"]
        last = replace(work, first=replace(first, x=x.last), second=replace(second, y=y.last))
        return LastWork(last, {"x": x, "y": y}, "y")


class PoolThroughChannelsLast(ThroughChannelsLast[PoolWork]):
    """A pooling's gradient from its input."""

    def _last(self, work: PoolWork) -> LastWork[PoolWork] | str:
        if work.x.channels_last:
            return CONTIGUOUS
        positions = work.taps * (1 + WINDOWS_COUNT / prod(work.stride))
        if positions * work.channels < POSITIONS_A_LANE * _pool_lanes(work):
            return f"windows of {work.kernel} with stride {work.stride}: copies would take longer"
        lead = f"{work.prefix}last_"
        sides = {
            "source": (work.source, work.input),
            "x": (work.x, work.input),
            "y": (work.y, work.output),
        }
        tensors = {
            name: LastTensor.of(given, work.batch, size, 1, work.channels, lead + name)
            for name, (given, size) in sides.items()
        }
        source, x, y = (tensors[name].last for name in sides)
        return LastWork(replace(work, source=source, x=x, y=y), tensors, "x")


def _pool_lanes(work: PoolWork) -> int:
    """Return the lanes that compute a position's channels: for two of a 16-bit type each, and for
    windows of several planes whole warps."""
    pairs = work.dtype.itemsize == 2 and work.channels % 2 == 0
    lanes = work.channels // 2 if pairs else work.channels
    return ceil_div(lanes, LANES) * LANES if work.kernel[0] > 1 else lanes
