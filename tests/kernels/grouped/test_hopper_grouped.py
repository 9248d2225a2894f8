"""Grouped 3x3 layers: on every backend, and their Hopper kernel in the emulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.grouped.hopper_grouped import HopperGrouped, cuts_of
from convgrad_service.backends.cuda.kernels.layout.channels_first import ConvThroughChannelsLast
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

LAYERS: dict[str, Conv] = {
    "c4_two_slices": Conv(1, 128, 128, (5, 9), (3, 3), padding=1, groups=32),
    "c4_odd_groups": Conv(2, 40, 40, (6, 17), (3, 3), padding=1, groups=10),
    "c8": Conv(3, 64, 64, (9, 28), (3, 3), padding=1, groups=8),
    "c8_few_channels": Conv(1, 24, 24, (4, 7), (3, 3), padding=1, groups=3),
    "c8_no_padding": Conv(1, 64, 64, (7, 18), (3, 3), groups=8),
    "c8_wide": Conv(1, 64, 64, (3, 70), (3, 3), padding=((0, 2), (2, 1)), groups=8),
    "c16": Conv(3, 64, 64, (14, 14), (3, 3), padding=1, groups=4),
    "c16_three_groups": Conv(1, 48, 48, (5, 15), (3, 3), padding=2, groups=3),
    "c32": Conv(5, 64, 64, (7, 7), (3, 3), padding=1, groups=2),
    "c32_one_row": Conv(2, 96, 96, (1, 20), (3, 3), padding=1, groups=3),
}
CASES = [
    # Without a bias, results are stored without an epilogue.
    replace(case, shapes={name: shape for name, shape in case.shapes.items() if name != "bias"})
    for operation in ("conv_fwd", "conv_bwd_data")
    for case in (FROM_CONV[operation](name, conv) for name, conv in LAYERS.items())
]
emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


class WithCut:
    """The family with the tiling at position ``share`` (0 to 1) in the list of candidates.

    It plans for one multiprocessor, so that a block has several units.
    """

    def __init__(self, share: float) -> None:
        self.name = "hopper_grouped"
        self._family = HopperGrouped()
        self._share = share

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return self._family.why_not(work, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        few = replace(device, multiprocessors=1)
        cuts = list(cuts_of(work, few))
        return self._family.fragment(work, few, cuts[int(self._share * (len(cuts) - 1))])

    def instances(self) -> Iterable[Instance]:
        return self._family.instances()


@lru_cache
def _backend(share: float) -> EmulatedBackend:
    # Together they support all of these.
    own = WithCut(share)
    families: list[Family[ConvWork]] = [own, ConvThroughChannelsLast(own, COPIES)]
    return EmulatedBackend(replace(FAMILIES, fwd=families, bwd_data=families))


def _compare(
    backend: Backend, seed: int, case: Case, dtype: str, gate: str, layouts: int = 2
) -> None:
    """Compare in the last ``layouts`` layouts: channels first and channels last."""
    tensors, wanted = drawn(seed, case, dtype, gate)
    for layout in with_layouts(case.ndim, grouped=False)[-layouts:]:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    _compare(backend, seed, case, dtype, gate)


# One kernel computes both directions.
@emulated
@pytest.mark.parametrize(
    ("case", "share"),
    [
        pytest.param(case, share, id=f"{case.id}-{share}", marks=[pytest.mark.slow] if slow else [])
        for case in CASES
        for share in (0.0, 1.0)
        for slow in [share > 0 and case.operation == "conv_fwd"]
    ],
)
def test_emulated(seed: int, case: Case, share: float) -> None:
    for gate in ("exact", "bounded"):
        _compare(_backend(share), seed, case, "bfloat16", gate, 1 if share else 2)


@emulated
@pytest.mark.parametrize("name", ["c4_odd_groups", "c16", "c32"])
def test_what_is_not_finite_reaches_what_it_meets_and_no_more(seed: int, name: str) -> None:
    for case in CASES:
        if case.name != name:
            continue
        layout = with_layouts(case.ndim, grouped=False)[-1]
        check_rule(_backend(0.0), seed, case, "bfloat16", layout)
