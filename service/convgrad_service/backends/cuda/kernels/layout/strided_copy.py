"""Copies between any strides, such as Ascend's formats and plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch
from convgrad_service.plans.cuda.works import Copy, CopyAxis

__all__ = ["TYPES", "StridedCopy", "joined", "padding_copy"]

BLOCK, AXES, BOUNDS = 256, 8, 2
# Elements of the last axis that a thread copies; it computes the other coordinates once.
LONGEST_RUN = 8
TYPES = {2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
"""By the size of an element, on which alone a copy depends."""


StridedCopyArgs = structure("layout/strided_copy.cu", "StridedCopyArgs")


class StridedCopy:
    """Any copy of at most eight axes."""

    name = "strided_copy"

    def why_not(self, work: Copy, device: CudaDevice) -> str | None:
        return None

    def launches(self, work: Copy, device: CudaDevice) -> Fragment:
        own = list(work.axes) if work.bounds else joined(work.axes)
        run = CopyAxis(1, 0, 0)
        if own and not work.bounds:
            # Divide a longer axis into equal runs.
            last = own.pop()
            length = max(n for n in range(1, LONGEST_RUN + 1) if last.extent % n == 0)
            if last.extent > length:
                over = last.source * length, last.target * length
                own.append(CopyAxis(last.extent // length, *over))
            run = replace(last, extent=length)
        missing = AXES - len(own)
        axes = (*[CopyAxis(1, 0, 0)] * missing, *own)
        args = StridedCopyArgs()
        args.extent[:] = [axis.extent for axis in axes]
        args.source_stride[:] = [axis.source for axis in axes]
        args.target_stride[:] = [axis.target for axis in axes]
        args.runs = prod(args.extent)
        args.run, args.run_source, args.run_target = run.extent, run.source, run.target
        bounds = [(outer + missing, inner + missing, limit) for outer, inner, limit in work.bounds]
        bounds += [(-1, -1, 0)] * (BOUNDS - len(bounds))
        args.outer[:], args.inner[:], args.limit[:] = zip(*bounds, strict=True)
        args.pads = work.pads
        args.source, args.target = (
            start * work.dtype.itemsize for start in (work.source_start, work.target_start)
        )
        launch = Launch(
            _instance(work.dtype.itemsize),
            linear_grid(args.runs, BLOCK),
            (BLOCK, 1, 1),
            pack(args, source=work.source, target=work.target),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        return [_instance(itemsize) for itemsize in TYPES]


def padding_copy(
    source: str,
    target: str,
    dtype: DType,
    axes: Sequence[CopyAxis],
    axis: int,
    limit: int,
    follows: bool = True,
) -> Copy:
    """Return a copy of which one axis has ``limit`` elements in the source, and zeros after them in
    the target if its extent is more."""
    if axes[axis].extent == limit:
        return Copy(source, target, dtype, tuple(axes), follows=follows)
    # A bound refers to two axes; the outer one here has extent 1.
    bounds = ((0, 1 + axis, limit),)
    return Copy(source, target, dtype, (CopyAxis(1, 0, 0), *axes), bounds, True, follows)


def joined(axes: Sequence[CopyAxis]) -> list[CopyAxis]:
    """Return axes without those of extent 1, and with adjacent ones merged that are contiguous on
    both sides."""
    found: list[CopyAxis] = []
    for axis in axes:
        if axis.extent == 1:
            continue
        steps = axis.extent * axis.source, axis.extent * axis.target
        if found and (found[-1].source, found[-1].target) == steps:
            found[-1] = replace(axis, extent=axis.extent * found[-1].extent)
        else:
            found.append(axis)
    return found


def _instance(itemsize: int) -> Instance:
    return Instance.of("layout/strided_copy.cu", ELEMENT=TYPES[itemsize])
