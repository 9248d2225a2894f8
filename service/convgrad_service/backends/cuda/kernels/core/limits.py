"""Limits that all dense tensor-core kernels share: dtype, architecture, index ranges."""

from __future__ import annotations

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["MAX_GRID_YZ", "MAX_PIXELS", "why_not_32bit_positions", "why_not_dense"]

# Positions are 32-bit, and kernels add several of them before they compare with a bound.
_MAX_EXTENT = 2**28
# Leaves room for the last tile, which may extend past the last pixel.
MAX_PIXELS = 2**31 - 1 - 1024
MAX_GRID_YZ = 65535


def why_not_dense(work: ConvWork, device: CudaDevice) -> str | None:
    """Return why no tensor-core kernel takes ``work``, or None."""
    if work.dtype is DType.FLOAT64:
        return "tensor cores that sum in float64 are not used"
    if device.capability < (8, 0):
        return f"{device.name} is older than sm_80"
    if work.groups > MAX_GRID_YZ:
        return f"{work.groups} groups are more than {MAX_GRID_YZ}"
    return why_not_32bit_positions(work)


def why_not_32bit_positions(work: ConvWork) -> str | None:
    """Return why sums of positions may overflow 32 bits, or None."""
    reach = (
        abs(value)
        for dim in range(3)
        for value in (
            work.input[dim],
            work.output[dim] * work.stride[dim],
            work.pad[dim],
            work.kernel[dim] * work.dilation[dim],
        )
    )
    if max(reach) > _MAX_EXTENT:
        return f"positions reach beyond {_MAX_EXTENT}"
    return None
