"""How two pieces of work share a GPU's multiprocessors while they run side by side.

Kernels of dense layers have as many blocks as there are multiprocessors. Of two such kernels the
second one's blocks wait for the first one's to end, so each has its tail and its start for itself,
which small layers feel. Planned for a share of the multiprocessors each, they run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen

__all__ = ["shared_out"]

# The second one's share of the multiprocessors: of 36 to 96 of 132 in steps of 6, 60 was best for
# most small layers, and none lost more than 4 % with it.
SHARE = 60 / 132
# Longer ones than this together are as fast or faster one after the other.
MOST_S = 80e-6
# What a kernel takes beside what is expected, to start, fill its pipeline and end; and what an
# expected gain must be to be believed.
APART_S, LEAST_GAIN = 10e-6, 0.08

Make = Callable[[CudaDevice], Chosen]


def shared_out(first: Make, second: Make, device: CudaDevice) -> tuple[Chosen, Chosen]:
    """Both planned for all multiprocessors, or each for its share where that should take less."""
    whole = first(device), second(device)
    each = _expected_s(*whole)
    if each is None or sum(each) > MOST_S:
        return whole
    # Even numbers, for clusters are pairs.
    count = 2 * round(SHARE * device.multiprocessors / 2)
    shares = (
        first(replace(device, multiprocessors=device.multiprocessors - count)),
        second(replace(device, multiprocessors=count)),
    )
    expected = _expected_s(*shares)
    if expected is None:
        return whole
    gains = max(expected) + APART_S < (1 - LEAST_GAIN) * (sum(each) + 2 * APART_S)
    return shares if gains else whole


def _expected_s(first: Chosen, second: Chosen) -> tuple[float, float] | None:
    of_first, of_second = first.fragment.expected_s, second.fragment.expected_s
    if of_first is None or of_second is None:
        return None
    return of_first, of_second
