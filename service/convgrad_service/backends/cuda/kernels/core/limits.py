"""Limits that all dense tensor-core kernels share: dtype, architecture, index ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DTYPES", "IN_16_BITS", "MAX_GRID_YZ", "MAX_PIXELS", "Requirements", "in_order"]
__all__ += ["is_pointwise", "why_not_32bit_positions", "why_not_dense"]

# Positions are 32-bit, and kernels add several of them before they compare with a bound.
_MAX_EXTENT = 2**28
# Leaves room for the last tile, which may extend past the last pixel.
MAX_PIXELS = 2**31 - 1 - 1024
MAX_GRID_YZ = 65535


IN_16_BITS = (DType.FLOAT16, DType.BFLOAT16)
DTYPES = (*IN_16_BITS, DType.FLOAT32)
"""The types whose products tensor cores add in float32."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a tensor-core kernel requires of every convolution: `why_not` says what is not met.

    Attributes
    ----------
    dtypes : tuple of DType
        Supported dtypes of the operands.
    tf32 : bool
        Whether float32 is computed in TF32, which requires ``precision: high``.
    hopper : bool
        Whether the kernel needs wgmma and TMA.
    grouped : bool or None
        True if it needs several groups, False if it allows only one, None for any.
    dilated : bool
        Whether dilation is supported.

    ``accumulate`` must have the strides of the result.
    """

    dtypes: tuple[DType, ...] = DTYPES
    tf32: bool = False
    hopper: bool = False
    grouped: bool | None = False
    dilated: bool = True

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """Return why work does not meet them, or None."""
        if self.hopper and device.architecture not in HOPPER:
            return f"{device.name} is not sm_90a, and has no wgmma"
        if device.capability < (8, 0):
            return f"{device.name} is older than sm_80"
        if work.dtype not in self.dtypes:
            return f"{work.dtype} is not {' or '.join(self.dtypes)}"
        if self.tf32 and work.dtype is DType.FLOAT32 and work.precision != "high":
            return "TF32 is less precise than the float32 that was requested"
        if self.grouped is not None and self.grouped != (work.groups > 1):
            return "one group" if self.grouped else f"{work.groups} groups"
        if not self.dilated and work.dilated:
            return "dilated"
        if work.accumulate is not None and work.accumulate.strides != work.result.strides:
            return "accumulate and the result have different strides"
        return None


def is_pointwise(work: ConvWork) -> bool:
    """Return whether it is a 1x1 convolution with stride 1 and without padding."""
    one = work.taps == 1 and max(work.stride) == 1
    return one and not any(work.pad) and work.input == work.output


def in_order(strides: Sequence[int], extents: Sequence[int]) -> bool:
    """Return whether one stride, the last, separates all positions of these dimensions."""
    step = strides[-1]
    for stride, extent in zip(reversed(strides), reversed(extents), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


ANY_GROUPS = Requirements(grouped=None)


def why_not_dense(work: ConvWork, device: CudaDevice) -> str | None:
    """Return why no tensor-core kernel takes ``work``, or None."""
    if (reason := ANY_GROUPS.why_not(work, device)) is not None:
        return reason
    if work.groups > MAX_GRID_YZ:
        return f"{work.groups} groups are more than {MAX_GRID_YZ}"
    return why_not_32bit_positions(work)


def why_not_32bit_positions(work: ConvWork) -> str | None:
    """Return why sums of positions may overflow 32 bits, or None."""
    pairs = zip(work.output, work.stride, strict=True), zip(work.kernel, work.dilation, strict=True)
    reach = *work.input, *map(abs, work.pad), *(a * b for each in pairs for a, b in each)
    if max(reach) > _MAX_EXTENT:
        return f"positions reach beyond {_MAX_EXTENT}"
    return None
