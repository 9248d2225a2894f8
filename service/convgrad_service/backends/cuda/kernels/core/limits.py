"""What dense kernels on any tensor cores need: the dtype, the architecture, wide counters."""

from __future__ import annotations

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["MAX_GRID_YZ", "MAX_PIXELS", "why_not_dense", "why_not_reach"]

# Positions are 32-bit, and several may be added up before one is compared with an edge.
_MAX_EXTENT = 2**28
# A tile may count past the last pixel.
MAX_PIXELS = 2**31 - 1 - 1024
MAX_GRID_YZ = 65535


def why_not_dense(work: ConvWork, device: CudaDevice) -> str | None:
    """Why tensor cores cannot compute it at all; None where they can."""
    if work.dtype is DType.FLOAT64:
        return "tensor cores that sum in float64 are not used"
    if device.capability < (8, 0):
        return f"{device.name} is older than sm_80"
    if work.groups > MAX_GRID_YZ:
        return f"{work.groups} groups are more than {MAX_GRID_YZ}"
    return why_not_reach(work)


def why_not_reach(work: ConvWork) -> str | None:
    """Why positions, several of them added up, or times the few channels of a first layer, may be
    more than 32 bits count; None where they are not."""
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
