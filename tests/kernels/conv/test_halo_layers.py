"""Dense layers with few channels: on every backend, and their Hopper kernel in the emulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_halo import HopperHalo
from convgrad_service.backends.cuda.kernels.conv.hopper_halo_tiles import halo_tiles
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axes
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import Case
from tests.support.numerics.halo_layers import HALO_LAYERS, halo_cases
from tests.support.numerics.nonfinite import check_rule

EPILOGUES = [
    case.with_tensor("accumulate", HALO_LAYERS[case.name].input_shape).with_params(
        "bilinear", alpha=2.0, beta=-0.25
    )
    for case in halo_cases()
    if case.operation == "conv_bwd_data" and case.name in ("resnet", "odd_channels", "3d")
]
CASES = [*halo_cases(), *EPILOGUES]
NONFINITE = [
    case for case in CASES if case.name.split("-")[0] in ("resnet", "3d_two_depths_at_once", "3d")
]
emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


class WithTile:
    """The family with the tile at position ``share`` (0 to 1) in the list of candidates."""

    def __init__(self, share: float) -> None:
        self.name = "hopper_halo"
        self._family = HopperHalo(anything=True)
        self._share = share

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return self._family.why_not(work, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        tiles = halo_tiles(work, gather_axes(work), device)
        return self._family.launches(work, device, tiles[int(self._share * (len(tiles) - 1))])

    def instances(self) -> Iterable[Instance]:
        return self._family.instances()


@lru_cache
def _backend(share: float) -> EmulatedBackend:
    families: list[Family[ConvWork]] = [WithTile(share), GatherDirect()]
    only = replace(FAMILIES, fwd=families, bwd_data=families)
    return EmulatedBackend(only)


def _compare(backend: Backend, seed: int, case: Case, dtype: str, gate: str, last: int) -> None:
    tensors, wanted = drawn(seed, case, dtype, gate)
    for layout in with_layouts(case.ndim, grouped=False)[-last:]:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    _compare(backend, seed, case, dtype, gate, 2)


# One kernel computes both directions, so half of the forward tests are marked slow.
@emulated
@pytest.mark.parametrize(
    ("case", "share"),
    [
        pytest.param(case, share, id=f"{case.id}-{share}", marks=[pytest.mark.slow] if slow else [])
        for case in CASES
        for share in (0.0, 0.8)
        for slow in [case.operation == "conv_fwd" and share > 0]
    ],
)
def test_emulated(seed: int, case: Case, share: float) -> None:
    for gate in ("exact", "bounded"):
        _compare(_backend(share), seed, case, "bfloat16", gate, 1 if share else 2)


@pytest.mark.parametrize("case", NONFINITE, ids=lambda case: case.id)
def test_nonfinite(backend: Backend, seed: int, case: Case) -> None:
    check_rule(backend, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1])


@emulated
@pytest.mark.parametrize("case", NONFINITE, ids=lambda case: case.id)
def test_emulated_nonfinite(seed: int, case: Case) -> None:
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        check_rule(_backend(0.0), seed, case, "bfloat16", layout)
