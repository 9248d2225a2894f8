"""Both gradients of a 1x1 convolution side by side, so that they read grad_output together.

One after the other, they read it twice from memory where it is larger than the L2. On half of the
multiprocessors each, two GEMMs sweep the pixels in the same order, and what one has read the other
finds in the L2: the one behind is the faster one until it has caught up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families
from convgrad_service.problems import ConvBwdData

__all__ = ["share_grad_output"]

FAMILY = "pointwise_gemm"
"""The family whose kernels sweep the pixels in order, for both gradients."""
# Other families that would take the work of half a device.
_OTHERS = ("hopper_weight", "hopper_weight_single", "hopper_gather")
# Of 22 layers of ResNet-50 and EfficientNet-B0 on an H200, these select 12, which are 1 to 25 %
# faster, and none that is slower. Arithmetic takes at most MOST_ARITHMETIC times as long as memory;
# and either grad_output is at least LEAST_OF_INPUT times as large as the input, or there is so much
# arithmetic (LEAST_ARITHMETIC) that one kernel can compute while the other reads.
MOST_ARITHMETIC, LEAST_ARITHMETIC, LEAST_OF_INPUT = 2.0, 0.5, 0.5
FLOPS_S, BYTES_S = 800e12, 4.2e12

Make = Callable[[CudaDevice, Families], Chosen]


def share_grad_output(
    weight: Make, data: Make, problem: ConvBwdData, device: CudaDevice, families: Families
) -> tuple[Chosen, Chosen] | None:
    """Plan both gradients for half of the device each, where that is expected to be faster.

    Parameters
    ----------
    weight, data : callable
        Choose the launches of one gradient for a device with the given multiprocessors.
    problem : ConvBwdData

    Returns
    -------
    tuple of Chosen or None
    """
    # Channels first and in float32, it was not measured.
    measured = problem.layout.channels_last and problem.dtype.itemsize == 2
    if not measured or not _gains(problem, device):
        return None
    half = replace(device, multiprocessors=device.multiprocessors // 2)
    own = families.without(_OTHERS)
    pair = weight(half, own), data(half, own)
    return pair if all(chosen.family == FAMILY for chosen in pair) else None


def _gains(problem: ConvBwdData, device: CudaDevice) -> bool:
    if set(problem.conv.kernel_size) | set(problem.conv.stride) != {1} or problem.conv.groups > 1:
        return False
    x, y = problem.input_spec.size_bytes, problem.output_spec.size_bytes
    memory_s, arithmetic_s = (y + 2 * x) / BYTES_S, 2 * problem.flops / FLOPS_S
    return (
        y + 2 * x > device.l2_bytes
        and arithmetic_s < MOST_ARITHMETIC * memory_s
        and (y >= LEAST_OF_INPUT * x or arithmetic_s > LEAST_ARITHMETIC * memory_s)
    )
