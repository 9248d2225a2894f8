"""Channels-first tensors through channels-last copies, padded if necessary.

A copy moves a tensor once at memory bandwidth, as these kernels do: the total is at most three
times the channels-last time. Channels-first kernels would share no loads between lanes along W, or
need a product for each tap. Tensors that are channels last are not copied, except for depthwise
convolutions whose pixels are not whole chunks of channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, TypeVar

from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family, Work, choose
from convgrad_service.plans.cuda.program import Fragment, Instance, Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Copy,
    CopyAxis,
    FusedWork,
    Operand,
    PoolWork,
    Size3,
    contiguous_strides,
)

__all__ = [
    "ConvThroughChannelsLast",
    "FusedThroughChannelsLast",
    "PoolThroughChannelsLast",
    "ThroughChannelsLast",
]

W = TypeVar("W", bound=Work)
ORDER = (0, 3, 4, 5)
"""The axes of N D H W in a view."""
APART = "groups are not contiguous"
CONTIGUOUS = "the channels are contiguous"


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An activation, and its channels-last form: itself, or a copy in a workspace."""

    given: Operand
    last: Operand
    extents: tuple[int, ...]  # N D H W, channels of all groups
    room: int  # channels of a pixel, with padding

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
    ) -> _Tensor:
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
        strides = ([one.strides[axis] for axis in (*ORDER, 2)] for one in (first, second))
        axes = tuple(CopyAxis(*axis) for axis in zip(self.extents, *strides, strict=True))
        if out or not self.last.padded:
            return Copy(first.buffer, second.buffer, self.given.dtype, axes)
        # A bound refers to two axes; the outer one here has extent 1.
        padded = (CopyAxis(1, 0, 0), *axes[:-1], replace(axes[-1], extent=self.room))
        bounds = ((0, len(axes), self.extents[-1]),)
        return Copy(first.buffer, second.buffer, self.given.dtype, padded, bounds, pads=True)


class ThroughChannelsLast(Generic[W]):
    """A family of channels-last tensors, ``inner``, between copies."""

    def __init__(self, inner: Family[W], copies: Sequence[Family[Copy]]) -> None:
        self.name = f"{inner.name}_through_channels_last"
        self._inner = inner
        self._copies = copies

    def instances(self) -> Iterable[Instance]:
        """None of its own; see `Family.instances`."""
        return ()

    def _around(
        self, work: W, tensors: Mapping[str, _Tensor], written: str | None, device: CudaDevice
    ) -> Fragment:
        """Return the inner family's launches on channels-last ``work``, between copies."""
        inner = self._inner.launches(work, device)
        before: list[Step] = []
        after: list[Step] = []
        for name, tensor in tensors.items():
            if tensor.copied:
                out = name == written
                fragment = choose(self._copies, tensor.copy(out), device).fragment
                (after if out else before).extend(fragment.steps)
        workspace = (tensor.workspace for tensor in tensors.values() if tensor.copied)
        return Fragment(
            f"{inner.kernel}_through_channels_last",
            (*before, *inner.steps, *after),
            (*workspace, *inner.workspace),
            inner.checks,
            expected_s=inner.expected_s,
            order=inner.order,
        )


class ConvThroughChannelsLast(ThroughChannelsLast[ConvWork]):
    """A grouped or depthwise convolution."""

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.groups == 1:
            return "one group"
        sides = (work.x, work.in_channels), (work.y, work.out_channels)
        if any(one.strides[1] != channels * one.strides[2] for one, channels in sides):
            return APART
        tensors = _activations(work)
        if not any(tensor.copied for tensor in tensors.values()):
            return CONTIGUOUS
        return self._inner.why_not(_channels_last(work, tensors), device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        tensors = _activations(work)
        written = {"fwd": "y", "bwd_data": "x"}.get(work.direction)
        return self._around(_channels_last(work, tensors), tensors, written, device)


def _activations(work: ConvWork) -> dict[str, _Tensor]:
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
        name: _Tensor.of(given, work.batch, size, work.groups, channels, lead + name, pads)
        for name, (given, channels, size) in sides.items()
    }


def _channels_last(work: ConvWork, tensors: Mapping[str, _Tensor]) -> ConvWork:
    """Return the work on channels-last tensors."""
    accumulate = tensors["accumulate"].last if "accumulate" in tensors else work.accumulate
    return replace(work, x=tensors["x"].last, y=tensors["y"].last, accumulate=accumulate)


class FusedThroughChannelsLast(ThroughChannelsLast[FusedWork]):
    """Two convolutions with the intermediate on chip."""

    def why_not(self, work: FusedWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.first.x.channels_last and work.second.y.channels_last:
            return CONTIGUOUS
        return self._inner.why_not(self._last(work)[0], device)

    def launches(self, work: FusedWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        last, tensors = self._last(work)
        return self._around(last, tensors, "y", device)

    def _last(self, work: FusedWork) -> tuple[FusedWork, dict[str, _Tensor]]:
        first, second = work.first, work.second
        read, written = _activations(first)["x"], _activations(second)["y"]
        last = replace(
            work, first=replace(first, x=read.last), second=replace(second, y=written.last)
        )
        return last, {"x": read, "y": written}


class PoolThroughChannelsLast(ThroughChannelsLast[PoolWork]):
    """A pooling's gradient from its input."""

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.x.channels_last:
            return CONTIGUOUS
        return self._inner.why_not(_channels_last_pool(work, _pooled(work)), device)

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        tensors = _pooled(work)
        return self._around(_channels_last_pool(work, tensors), tensors, "x", device)


def _pooled(work: PoolWork) -> dict[str, _Tensor]:
    """Return the activations by the work's field names."""
    sides = {
        "source": (work.source, work.input),
        "x": (work.x, work.input),
        "y": (work.y, work.output),
    }
    return {
        name: _Tensor.of(given, work.batch, size, 1, work.channels, f"{work.prefix}last_{name}")
        for name, (given, size) in sides.items()
    }


def _channels_last_pool(work: PoolWork, tensors: Mapping[str, _Tensor]) -> PoolWork:
    """Return the work on channels-last tensors."""
    return replace(work, source=tensors["source"].last, x=tensors["x"].last, y=tensors["y"].last)
