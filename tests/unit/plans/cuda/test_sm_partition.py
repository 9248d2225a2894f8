"""Two pieces of work side by side: each planned for its share of the GPU where that should gain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.families import Chosen
from convgrad_service.plans.cuda.program import Fragment
from convgrad_service.plans.cuda.sm_partition import LONGEST_S, partition_multiprocessors

Make = Callable[[CudaDevice], Chosen]


def made(expected_s: Callable[[int], float | None]) -> Make:
    def make(device: CudaDevice) -> Chosen:
        count = device.multiprocessors
        return Chosen("fake", Fragment(str(count), (), expected_s=expected_s(count)), ())

    return make


def partitioned(first: Make, second: Make, device: CudaDevice = H200) -> list[str]:
    whole = first(device), second(device)
    pair = partition_multiprocessors(whole, first, second, device)
    return [chosen.fragment.kernel for chosen in pair]


WHOLE = [str(H200.multiprocessors)] * 2


def test_small_work_is_shared_out() -> None:
    """Half as many multiprocessors take less than twice as long, and each has one start."""
    small = made(lambda count: 10e-6 + 1.5e-3 / count)
    assert partitioned(small, small) == ["72", "60"]


@pytest.mark.parametrize("multiprocessors", [1, 2])
def test_too_few_multiprocessors_are_not_divided(multiprocessors: int) -> None:
    device = replace(H200, multiprocessors=multiprocessors)
    small = made(lambda count: 10e-6 + 1e-6 / count)
    assert partitioned(small, small, device) == [str(multiprocessors)] * 2


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("too long", lambda _: LONGEST_S, lambda _: 1e-6),
        ("no expectation", lambda _: None, lambda _: 20e-6),
        ("none for a share", lambda count: 20e-6 if count == 132 else None, lambda _: 20e-6),
        ("one much longer", lambda count: 60e-6 * 132 / count, lambda _: 1e-6),
    ],
)
def test_other_work_is_not(
    what: str, first: Callable[[int], float | None], second: Callable[[int], float | None]
) -> None:
    assert partitioned(made(first), made(second)) == WHOLE, what
