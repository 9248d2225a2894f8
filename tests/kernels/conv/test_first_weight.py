"""Weight gradients of first layers in place: on every backend and emulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.first_weight import FirstWeight
from convgrad_service.backends.cuda.kernels.conv.first_weight_cuts import TILES, Cut, Tile
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.first_layer_cases import CASES as FIRST
from tests.support.kernels.first_layer_cases import OPERATION
from tests.support.kernels.harness import answers, check, drawn, gates, with_layouts
from tests.support.numerics.arrays import rng_for
from tests.support.numerics.cases import FROM_CONV
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.oracle import expected

MORE = {
    # More taps than a block has, and rows of several segments.
    "tall": Conv(1, 1, 40, (50, 40), (41, 11), 2),
    "pointwise": Conv(2, 8, 48, (12, 20), (1, 1)),
    "column": Conv(2, 1, 32, (33, 5), (5, 1), (3, 1), (2, 0)),
    "many_channels_out": Conv(1, 3, 72, (9, 20), (3, 3), 1, 1),
}
CASES = FIRST | {name: FROM_CONV[OPERATION](name, conv) for name, conv in MORE.items()}
NONFINITE = ("resnet", "patches", "asymmetric_padding", "odd_width", "six_channels", "3d")
EMULATED = ("vgg", "odd_start", "six_channels", "tall", "column")
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


class Few(FirstWeight):
    """The family with several units of several images per block."""

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        return super().fragment(replace(work, split_k=work.split_k or 3), device, cut)


def emulated() -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=(Few(),)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_gates(backend: Backend, seed: int, name: str, dtype: str) -> None:
    gates(backend, seed, CASES[name], dtype, with_layouts(CASES[name].ndim, grouped=False))


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated(seed: int, name: str) -> None:
    layouts = with_layouts(CASES[name].ndim, grouped=False)[1:]
    gates(emulated(), seed, CASES[name], "float32", layouts)


@emulation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_16_bits(seed: int, name: str, dtype: str) -> None:
    gates(emulated(), seed, CASES[name], dtype, with_layouts(2, grouped=False)[1:])


@emulation
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_tf32(seed: int, name: str) -> None:
    gates(emulated(), seed, CASES[name], "tf32", with_layouts(2, grouped=False)[-1:])


@emulation
@pytest.mark.parametrize("name", NONFINITE)
def test_emulated_nonfinite(seed: int, name: str) -> None:
    for layout in with_layouts(CASES[name].ndim, grouped=False)[1:]:
        check_rule(emulated(), seed, CASES[name], "float32", layout)


@emulation
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-95, 2.0**100])
@pytest.mark.parametrize("of", ["grad_output", "input"])
def test_emulated_magnitudes(seed: int, of: str, scale: float) -> None:
    """Numbers whose low parts underflow in TF32, mixed with zeros, and large ones."""
    case = CASES["vgg"]
    tensors, _ = drawn(seed, case, "float32", "bounded")
    rng = rng_for(seed, case.id)
    other = "input" if of == "grad_output" else "grad_output"
    for name, factor in ((of, scale), (other, 1 / scale)):
        tensors[name] = (tensors[name] * factor).astype(np.float32)
        tensors[name].flat[rng.integers(tensors[name].size, size=9)] = 0
    wanted = expected(case.operation, tensors, case.params)
    found = answers(emulated(), case, tensors, "NCHW")
    check(found, wanted, "bounded", f"seed {seed}, {of} x {scale}")


@emulation
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.fragments}")
@pytest.mark.parametrize("name", ["vgg", "column"])
def test_every_tile(monkeypatch: pytest.MonkeyPatch, seed: int, name: str, tile: Tile) -> None:
    monkeypatch.setattr(
        "convgrad_service.backends.cuda.kernels.conv.first_weight_cuts.TILES", (tile,)
    )
    gates(emulated(), seed, CASES[name], "float32", with_layouts(2, grouped=False)[1:])
