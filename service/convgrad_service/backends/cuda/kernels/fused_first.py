"""The fused kernels on channels-first tensors, by way of channels-last copies.

The input is copied once, and so is the output: of two launches each would do the same around an
intermediate that is copied too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_families import Family, choose
from convgrad_service.plans.cuda_program import Fragment, Instance, Workspace
from convgrad_service.plans.cuda_works import Copy, CopyAxis, FusedWork, Operand, Size3

__all__ = ["FusedThroughChannelsLast"]


class FusedThroughChannelsLast:
    """``inner``, a fused family of channels-last tensors, between ``copies``."""

    def __init__(self, inner: Family[FusedWork], copies: Sequence[Family[Copy]]) -> None:
        self.name = f"{inner.name}_through_channels_last"
        self._inner = inner
        self._copies = copies

    def why_not(self, work: FusedWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if _channel_stride(work.first.x, work.first.groups) == 1 == work.second.y.strides[2]:
            return "the channels lie side by side as they are"
        return self._inner.why_not(_inner_work(work), device)

    def launches(self, work: FusedWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        first, second, last = work.first, work.second, _inner_work(work)
        x_channels = first.groups * first.in_channels
        before = _copy(first.x, last.first.x, first.groups, first.batch, x_channels, first.input)
        after = _copy(last.second.y, second.y, 1, second.batch, second.out_channels, second.output)
        inner = self._inner.launches(last, device)
        copies = [choose(self._copies, copy, device).fragment.steps for copy in (before, after)]
        itemsize = first.dtype.itemsize
        workspace = (
            Workspace(before.target, first.batch * x_channels * prod(first.input) * itemsize),
            Workspace(
                after.source, second.batch * second.out_channels * prod(second.output) * itemsize
            ),
        )
        return Fragment(
            f"{inner.kernel}_through_channels_last",
            (*copies[0], *inner.steps, *copies[1]),
            (*workspace, *inner.workspace),
            inner.checks,
        )

    def instances(self) -> Iterable[Instance]:
        """None of its own: see `Family.instances` of the families that it joins."""
        return ()


def _channel_stride(operand: Operand, groups: int) -> int:
    """Between neighbouring channels, of a tensor that has one of two kinds: a channel a group, or
    one group."""
    return operand.strides[1 if groups > 1 else 2]


def _inner_work(work: FusedWork) -> FusedWork:
    first, second = work.first, work.second
    x = _channels_last(
        first.x, f"{first.prefix}last_x", first.in_channels, first.groups, first.input
    )
    y = _channels_last(second.y, f"{second.prefix}last_y", second.out_channels, 1, second.output)
    return replace(work, first=replace(first, x=x), second=replace(second, y=y))


def _channels_last(given: Operand, buffer: str, channels: int, groups: int, size: Size3) -> Operand:
    depth, height, width = size
    pixel = channels * groups
    strides = (
        depth * height * width * pixel,
        channels,
        1,
        height * width * pixel,
        width * pixel,
        pixel,
    )
    return Operand(buffer, given.dtype, strides)


def _copy(
    source: Operand, target: Operand, groups: int, batch: int, channels: int, size: Size3
) -> Copy:
    """Between two orders of a tensor's dimensions."""
    sides = [
        (one.strides[0], *one.strides[3:], _channel_stride(one, groups)) for one in (source, target)
    ]
    extents = (batch, *size, channels)
    axes = tuple(CopyAxis(*axis) for axis in zip(extents, *sides, strict=True))
    return Copy(source.buffer, target.buffer, source.dtype, axes)
