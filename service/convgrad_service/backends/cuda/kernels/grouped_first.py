"""Grouped convolutions of channels-first tensors, by way of channels-last copies.

A copy moves a tensor once at the memory's speed, and so does a grouped kernel: three times the
channels-last time at most, where a kernel whose lanes run along W has a product for each tap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_families import Family, choose
from convgrad_service.plans.cuda_program import Fragment, Instance, Step, Workspace
from convgrad_service.plans.cuda_works import (
    ConvWork,
    Copy,
    CopyAxis,
    Operand,
    Size3,
    contiguous_strides,
)

__all__ = ["GroupedChannelsFirst"]

ORDER = (0, 3, 4, 5)
"""N D H W among a view's axes."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An activation of a work, and the same in a workspace of channels-last order."""

    given: Operand
    last: Operand
    extents: tuple[int, ...]  # N D H W C

    @property
    def size_bytes(self) -> int:
        return prod(self.extents) * self.given.dtype.itemsize

    def copy(self, out: bool) -> Copy:
        """Out of the workspace, or into it."""
        first, second = (self.last, self.given) if out else (self.given, self.last)
        strides = ([one.strides[axis] for axis in (*ORDER, 2)] for one in (first, second))
        axes = tuple(CopyAxis(*axis) for axis in zip(self.extents, *strides, strict=True))
        return Copy(first.buffer, second.buffer, self.given.dtype, axes)


class GroupedChannelsFirst:
    """``inner``, a grouped family of channels-last tensors, between ``copies``."""

    def __init__(self, inner: Family[ConvWork], copies: Sequence[Family[Copy]]) -> None:
        self.name = f"{inner.name}_through_channels_last"
        self._inner = inner
        self._copies = copies

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.groups == 1:
            return "one group"
        sides = (work.x, work.in_channels), (work.y, work.out_channels)
        for operand, channels in sides:
            if operand.strides[1] != channels * operand.strides[2]:
                return "groups do not follow one another"
        if work.x.strides[2] == 1 and work.y.strides[2] == 1:
            return "the channels lie side by side as they are"
        return self._inner.why_not(_inner_work(work, _tensors(work)), device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        tensors = _tensors(work)
        inner = self._inner.launches(_inner_work(work, tensors), device)
        written = {"fwd": "y", "bwd_data": "x"}.get(work.direction)
        before: list[Step] = []
        after: list[Step] = []
        for name, tensor in tensors.items():
            out = name == written
            fragment = choose(self._copies, tensor.copy(out), device).fragment
            (after if out else before).extend(fragment.steps)
        workspace = tuple(
            Workspace(tensor.last.buffer, tensor.size_bytes) for tensor in tensors.values()
        )
        return Fragment(
            f"{inner.kernel}_through_channels_last",
            (*before, *inner.steps, *after),
            (*workspace, *inner.workspace),
            inner.checks,
        )

    def instances(self) -> Iterable[Instance]:
        """None of its own: see `Family.instances` of the families that it joins."""
        return ()


def _tensors(work: ConvWork) -> dict[str, _Tensor]:
    """Of the work's fields, those that are activations."""
    sides = {
        "x": (work.x, work.in_channels, work.input),
        "y": (work.y, work.out_channels, work.output),
    }
    if work.accumulate is not None and work.direction == "bwd_data":
        sides["accumulate"] = (work.accumulate, work.in_channels, work.input)
    return {name: _tensor(work, name, *side) for name, side in sides.items()}


def _tensor(work: ConvWork, name: str, given: Operand, channels: int, size: Size3) -> _Tensor:
    extents = (work.batch, *size, work.groups * channels)
    image, plane, row, pixel, _ = contiguous_strides(extents)
    buffer = f"{work.prefix}{work.direction}.last_{name}"
    last = Operand(buffer, given.dtype, (image, channels, 1, plane, row, pixel))
    return _Tensor(given, last, extents)


def _inner_work(work: ConvWork, tensors: dict[str, _Tensor]) -> ConvWork:
    accumulate = tensors["accumulate"].last if "accumulate" in tensors else work.accumulate
    return replace(work, x=tensors["x"].last, y=tensors["y"].last, accumulate=accumulate)
