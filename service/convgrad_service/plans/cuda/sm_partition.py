"""Dividing a GPU's multiprocessors between two kernels that run concurrently.

Kernels of dense layers have one block for each multiprocessor. The blocks of a second such kernel
wait until those of the first end, so both pay for their own start and tail, which dominates small
layers. Planned for a part of the multiprocessors each, the two run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen

__all__ = ["partition_multiprocessors"]

# Fraction of the multiprocessors that the second kernel gets. Of 36 to 96 of 132 in steps of 6, 60
# was best for most small layers, and none lost more than 4 % with it.
SECOND_FRACTION = 60 / 132
# Two kernels that take longer than this together are as fast or faster one after the other.
LONGEST_S = 80e-6
# Time that a kernel needs to start, fill its pipeline and drain, which its model does not count;
# and the smallest relative gain that the models are accurate enough to predict.
FIXED_S, LEAST_GAIN = 10e-6, 0.08

Make = Callable[[CudaDevice], Chosen]


def partition_multiprocessors(
    whole: tuple[Chosen, Chosen], first: Make, second: Make, device: CudaDevice
) -> tuple[Chosen, Chosen]:
    """Plan each for a part of the device where that is expected to be faster, else keep both.

    Parameters
    ----------
    whole : tuple of Chosen
        Both for the whole device.
    first, second : callable
        Choose the launches of one kernel for a device with the given multiprocessors.
    """
    whole_s = _expected_s(*whole)
    if whole_s is None or sum(whole_s) > LONGEST_S:
        return whole
    # An even count, because clusters are pairs.
    count = 2 * round(SECOND_FRACTION * device.multiprocessors / 2)
    if not 0 < count < device.multiprocessors:
        return whole
    parts = (
        first(replace(device, multiprocessors=device.multiprocessors - count)),
        second(replace(device, multiprocessors=count)),
    )
    parts_s = _expected_s(*parts)
    if parts_s is None:
        return whole
    gains = max(parts_s) + FIXED_S < (1 - LEAST_GAIN) * (sum(whole_s) + 2 * FIXED_S)
    return parts if gains else whole


def _expected_s(first: Chosen, second: Chosen) -> tuple[float, float] | None:
    first_s, second_s = first.fragment.expected_s, second.fragment.expected_s
    return None if first_s is None or second_s is None else (first_s, second_s)
