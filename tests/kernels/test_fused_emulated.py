"""The fused GPU kernels, run on the CPU: Hopper's products and those of mma.sync."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fused.fused_separable import FusedSeparable
from convgrad_service.backends.cuda.kernels.fused.fused_shapes import FusedShape
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.works import FusedWork
from tests.cases import Case
from tests.emulator.backend import EmulatedBackend, works_here
from tests.kernels.fused_cases import LAYOUT, SEPARABLE
from tests.kernels.harness import answers, check, drawn
from tests.kernels.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

SMALL = ("3x3", "tails", "one_pixel", "rectangles")

FAMILY: Mapping[str, Callable[[], Family[FusedWork]]] = {
    # Half of the threads compute, half multiply.
    "roles": lambda: FusedSeparable([FusedShape(2, 2, 96, 1, roles=True)]),
    # One chunk of channels and one pass, several blocks a multiprocessor.
    "single": lambda: FusedSeparable([FusedShape(1, 2, 64, 3, single=True)], hopper=False),
    "mma": lambda: FusedSeparable([FusedShape(2, 2, 96, 1)], hopper=False),
}
CASES = {
    "roles": SEPARABLE,
    "single": [case for case in SEPARABLE if case.name in SMALL],
    # What takes the sliding window, in one chunk and in several.
    "mma": SEPARABLE[:5],
}
TAKEN = [
    pytest.param(name, case, gate, id=f"{name}-{case.name}-{gate}")
    for name, cases in CASES.items()
    for case in cases
    for gate in ("exact", "bounded")
    if gate == "bounded" or "silu" not in case.params.values()
]


@lru_cache
def emulated(name: str) -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, fused=[FAMILY[name]()]))


@pytest.mark.parametrize(("name", "case", "gate"), TAKEN)
def test_fused(seed: int, name: str, case: Case, gate: str) -> None:
    """One kernel, and within both gates."""
    backend = emulated(name)
    tensors, wanted = drawn(seed, case, "bfloat16", gate)
    found = answers(backend, case, tensors, LAYOUT[case.ndim])
    check(found, wanted, gate, f"seed {seed}, {case.id} {name}")


def test_float16(seed: int) -> None:
    case = CASES["roles"][1]
    tensors, wanted = drawn(seed, case, "float16", "bounded")
    check(answers(emulated("roles"), case, tensors, "NHWC"), wanted, "bounded", f"seed {seed}")


@pytest.mark.parametrize("name", ["roles", "single", "mma"])
def test_what_is_not_finite_stays_where_it_belongs(seed: int, name: str) -> None:
    for case in CASES[name]:
        if case.name in ("3x3", "tails"):
            check_rule(emulated(name), seed, case, "float16", LAYOUT[case.ndim])
