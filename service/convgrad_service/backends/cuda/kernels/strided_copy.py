"""Copies between orders in memory: Ascend's formats and plain ones."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from math import prod

from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.elements import linear_grid
from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch
from convgrad_service.plans.cuda_works import Copy, CopyAxis

__all__ = ["StridedCopy"]

BLOCK, AXES, BOUNDS = 256, 8, 2
# A copy needs to know an element's size alone.
_TYPES = {2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


class StridedCopyArgs(ctypes.Structure):
    """See ``strided_copy.cu``."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("elements", ctypes.c_int64),
        ("extent", ctypes.c_int64 * AXES),
        ("source_stride", ctypes.c_int64 * AXES),
        ("target_stride", ctypes.c_int64 * AXES),
        ("limit", ctypes.c_int64 * BOUNDS),
        ("outer", ctypes.c_int32 * BOUNDS),
        ("inner", ctypes.c_int32 * BOUNDS),
        ("pads", ctypes.c_int32),
    )


class StridedCopy:
    """Any copy of at most eight axes."""

    name = "strided_copy"

    def why_not(self, work: Copy, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        return None

    def launches(self, work: Copy, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        missing = AXES - len(work.axes)
        axes = (*[CopyAxis(1, 0, 0)] * missing, *work.axes)
        args = StridedCopyArgs()
        args.extent[:] = [axis.extent for axis in axes]
        args.source_stride[:] = [axis.source for axis in axes]
        args.target_stride[:] = [axis.target for axis in axes]
        args.elements = prod(args.extent)
        bounds = [(outer + missing, inner + missing, limit) for outer, inner, limit in work.bounds]
        bounds += [(-1, -1, 0)] * (BOUNDS - len(bounds))
        args.outer[:], args.inner[:], args.limit[:] = zip(*bounds, strict=True)
        args.pads = work.pads
        launch = Launch(
            _instance(work.dtype.itemsize),
            linear_grid(args.elements, BLOCK),
            (BLOCK, 1, 1),
            pack(args, source=work.source, target=work.target),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(itemsize) for itemsize in _TYPES]


def _instance(itemsize: int) -> Instance:
    return Instance("strided_copy.cu", "strided_copy", (("ELEMENT", _TYPES[itemsize]),))
