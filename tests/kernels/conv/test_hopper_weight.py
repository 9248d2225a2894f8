"""Dense weight gradients on Hopper, with every kind of tiling, on every backend and emulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight, reachable
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_cuts import Cut
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Families
from convgrad_service.plans.cuda.program import Fragment
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import ROUNDED, gates, with_layouts
from tests.support.kernels.weight_cases import CASES, EPILOGUE, NONFINITE
from tests.support.numerics.cases import Case
from tests.support.numerics.nonfinite import check_rule

# Kinds of tiling: a tile, whether taps share a box, and the use of the cluster.
KINDS: dict[str, Callable[[Cut], bool]] = {
    "128x192": lambda cut: cut.cluster == 1,
    "128x192_together": lambda cut: cut.cluster == 1 and cut.shared_taps == 1,
    "128x192_shared_input_together": lambda cut: cut.cluster > 1 and cut.rows_first,
    "128x192_taps": lambda cut: cut.cluster == 1 and cut.shared_taps > 1,
    "128x192_shared_input": lambda cut: cut.cluster > 1 and cut.rows_first and not cut.sums,
    "128x192_shared_grad": lambda cut: cut.cluster > 1 and not cut.rows_first and not cut.sums,
    "128x192_summed": lambda cut: cut.summing == cut.cluster == 3,
    "128x192_shared_grad_summed": lambda cut: cut.cluster == 8 and not cut.rows_first,
    "256x128_shared_input_summed": lambda cut: cut.cluster == 8 and cut.rows_first,
    "64x576_taps": lambda cut: cut.cluster == 1 and cut.shared_taps > 1,
    "64x288": lambda cut: cut.cluster == 1,
    "128x192_taps_together": lambda cut: cut.cluster == 1 and cut.shared_taps > 1,
    "64x288_together": lambda cut: cut.cluster == 1 and cut.shared_taps > 1,
    "256x64": lambda cut: cut.cluster == 1,
    "128x192_whole": lambda cut: cut.cluster == 1 and cut.whole == cut.tiles,
}
# Of tiles in TF32.
TF32_KINDS: dict[str, Callable[[Cut], bool]] = {
    "256x128": lambda cut: cut.cluster == 1,
    "128x128_shared_input": lambda cut: cut.cluster > 1 and cut.rows_first and not cut.sums,
    "128x128_shared_grad_together": lambda cut: cut.cluster > 1 and not cut.rows_first,
    "128x64_summed": lambda cut: cut.summing == cut.cluster == 2,
    "64x128_together": lambda cut: cut.cluster == 1,
    "64x64_summed": lambda cut: cut.summing == cut.cluster == 4,
    "128x32_whole": lambda cut: cut.cluster == 1 and cut.whole == cut.tiles,
}
KINDS |= TF32_KINDS
# Each kind is compiled for the emulator, so only few geometries run with many kinds.
EMULATED = [(name, "128x192", "bfloat16") for name in CASES]
EMULATED += [(name, "128x192_taps", "bfloat16") for name in CASES if "strid" not in name]
EMULATED += [
    (name, kind, "bfloat16")
    for kind in KINDS
    if kind not in ("128x192", "128x192_taps", *TF32_KINDS)
    for name in ("plain", "many_tiles", "channels_67_to_131", "dilated", "3d")
]
EMULATED += [
    ("tiles_and_steps", kind, "tf32" if kind in TF32_KINDS else "bfloat16")
    for kind in KINDS
    if "summed" in kind
]
EMULATED += [(name, "128x192", "float16") for name in ("plain", "3d_strided")]
EMULATED += [(name, "64x128_together", "tf32") for name in CASES if "67" not in name]
EMULATED += [
    (name, kind, "tf32")
    for kind in TF32_KINDS
    for name in ("plain", "many_tiles", "channels_24_to_40", "3d")
]
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@lru_cache(maxsize=256)
def reached(work: ConvWork, device: CudaDevice) -> tuple[Cut, ...]:
    """Return the candidates from which each kind is chosen."""
    return tuple(reachable(work, device))


class OfKind(HopperWeight):
    """The family with the first tiling of a kind, with the most shares, ignoring the cost model."""

    def __init__(self, kind: str) -> None:
        super().__init__(least_channels=1)
        self._kind, self._tile, self._is = kind, kind.split("_")[0], KINDS[kind]
        self._together = kind.endswith("_together")

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return super().why_not(work, device) or (
            None if self._cuts(work, device) else "no cut of this kind"
        )

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        cuts = self._cuts(work, device)
        return super().launches(work, device, max(cuts, key=lambda one: one.shares))

    def _cuts(self, work: ConvWork, device: CudaDevice) -> list[Cut]:
        # Few multiprocessors, so that blocks have several units, except "summed" kinds.
        few = device if self._kind.endswith("summed") else replace(device, multiprocessors=12)
        cuts = reached(work, few)
        of_tile = (cut for cut in cuts if cut.tile.name == self._tile)
        return [cut for cut in of_tile if cut.together is self._together and self._is(cut)]


def of_kind(kind: str) -> Families:
    return replace(FAMILIES, bwd_weight=(OfKind(kind), WeightDirect()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32"])
@pytest.mark.parametrize("name", CASES)
def test_gates(backend: Backend, seed: int, name: str, dtype: str) -> None:
    gates(backend, seed, CASES[name], dtype, with_layouts(CASES[name].ndim, grouped=False))


@pytest.mark.parametrize("name", NONFINITE)
def test_nonfinite(backend: Backend, seed: int, name: str) -> None:
    check_rule(
        backend, seed, CASES[name], "bfloat16", with_layouts(CASES[name].ndim, grouped=False)[-1]
    )


@emulation
@pytest.mark.parametrize(("name", "kind", "dtype"), EMULATED)
def test_emulated(seed: int, name: str, kind: str, dtype: str) -> None:
    layouts = with_layouts(CASES[name].ndim, grouped=False)
    gates(EmulatedBackend(of_kind(kind)), seed, CASES[name], dtype, layouts[-1:])


@emulation
@pytest.mark.parametrize("name", ["channels_36_to_20", "output_1"])
def test_emulated_as_planned(seed: int, name: str) -> None:
    """Small sums are written to the result directly, in float32 two channels at a time."""
    families = replace(FAMILIES, bwd_weight=(HopperWeight(1), WeightDirect()))
    case = CASES[name].with_params("wide", weight_dtype="float32")
    gates(EmulatedBackend(families), seed, case, "bfloat16", with_layouts(case.ndim, grouped=False))


@emulation
@pytest.mark.parametrize("kind", ["128x192", "128x192_taps", "128x192_summed", "128x192_together"])
@pytest.mark.parametrize("name", NONFINITE)
def test_emulated_nonfinite(seed: int, name: str, kind: str) -> None:
    layout = with_layouts(CASES[name].ndim, grouped=False)[-1]
    check_rule(EmulatedBackend(of_kind(kind)), seed, CASES[name], "bfloat16", layout)


@emulation
@pytest.mark.parametrize("name", [name for name in NONFINITE if "67" not in name])
def test_emulated_nonfinite_tf32(seed: int, name: str) -> None:
    case = CASES[name].with_params("high", precision="high")
    layout = with_layouts(case.ndim, grouped=False)[-1]
    check_rule(EmulatedBackend(of_kind("64x128_together")), seed, case, "float32", layout, ROUNDED)


# Kinds alternate over cases; the others are marked slow.
@emulation
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(
            case, kind, id=f"{case.id}-{kind}", marks=[pytest.mark.slow] if (i + j) % 3 else []
        )
        for i, case in enumerate(EPILOGUE)
        for j, kind in enumerate(("128x192", "128x192_summed", "128x192_together"))
    ],
)
def test_emulated_epilogues(seed: int, case: Case, kind: str) -> None:
    layouts = with_layouts(case.ndim, grouped=False)
    wide = (
        case.with_params("wide", weight_dtype="float32")
        if "accumulate" not in case.shapes
        else case
    )
    for asked in (case, wide):
        gates(EmulatedBackend(of_kind(kind)), seed, asked, "bfloat16", layouts[-1:])
