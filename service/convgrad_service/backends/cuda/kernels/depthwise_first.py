"""Depthwise convolutions of channels-first tensors, by way of channels-last copies.

A depthwise kernel moves each tensor once, and so does a copy at the memory's speed: at most three
times the channels-last time, where a direct kernel with its lanes along W shares no loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from convgrad_service.backends.cuda.kernels.depthwise_tiles import CHUNK_BYTES
from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_families import Family, choose
from convgrad_service.plans.cuda_program import Fragment, Instance, Step, Workspace
from convgrad_service.plans.cuda_works import ConvWork, Copy, CopyAxis, Operand, Size3

__all__ = ["ThroughChannelsLast"]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An operand of a work, and the same in a workspace of channels-last order."""

    given: Operand
    last: Operand
    extents: tuple[int, ...]  # N D H W C

    @property
    def size_bytes(self) -> int:
        return prod(self.extents) * self.given.dtype.itemsize

    def copy(self, out: bool) -> Copy:
        """Out of the workspace, or into it."""
        sides = [
            (strides[0], *strides[3:], strides[1])
            for strides in (self.given.strides, self.last.strides)
        ]
        source, target = sides[::-1] if out else sides
        first, second = (self.last, self.given) if out else (self.given, self.last)
        axes = tuple(CopyAxis(*axis) for axis in zip(self.extents, source, target, strict=True))
        return Copy(first.buffer, second.buffer, self.given.dtype, axes)


class ThroughChannelsLast:
    """``inner``, a depthwise family of channels-last tensors, between ``copies``."""

    def __init__(self, inner: Family[ConvWork], copies: Sequence[Family[Copy]]) -> None:
        self.name = f"{inner.name}_through_channels_last"
        self._inner = inner
        self._copies = copies

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.groups == 1 or work.in_channels != 1 or work.out_channels != 1:
            return "not one input and one output channel a group"
        if work.x.strides[1] == 1 and work.y.strides[1] == 1:
            return "the channels lie side by side as they are"
        chunk = CHUNK_BYTES // work.dtype.itemsize
        if work.groups % chunk:
            return f"{work.groups} channels are no multiple of {chunk}"
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
    tensors = {
        "x": _tensor(work, "x", work.x, work.input),
        "y": _tensor(work, "y", work.y, work.output),
    }
    if work.accumulate is not None and work.direction == "bwd_data":
        tensors["accumulate"] = _tensor(work, "accumulate", work.accumulate, work.input)
    return tensors


def _tensor(work: ConvWork, name: str, given: Operand, size: Size3) -> _Tensor:
    depth, height, width = size
    channels = work.groups
    row = width * channels
    last = Operand(
        f"{work.prefix}{work.direction}.last_{name}",
        given.dtype,
        (depth * height * row, 1, 1, height * row, row, channels),
    )
    return _Tensor(given, last, (work.batch, depth, height, width, channels))


def _inner_work(work: ConvWork, tensors: dict[str, _Tensor]) -> ConvWork:
    accumulate = tensors["accumulate"].last if "accumulate" in tensors else work.accumulate
    return replace(work, x=tensors["x"].last, y=tensors["y"].last, accumulate=accumulate)
