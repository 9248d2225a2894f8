"""1x1 layers with few channels of the source, by FMA: on every backend and emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.few_sources import FewSources
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.cases import FROM_CONV
from tests.support.numerics.geometries import Conv

GEOMETRIES = {
    "three": Conv(2, 32, 3, (6, 12), (1, 1)),
    "odd": Conv(2, 21, 3, (5, 7), (1, 1)),
    "one": Conv(3, 130, 1, (40,), (1,)),
    "3d": Conv(1, 24, 8, (3, 4, 6), (1, 1, 1)),
}
CASES = {name: FROM_CONV["conv_bwd_data"](name, conv) for name, conv in GEOMETRIES.items()}
FORWARD = {"forward": Conv(2, 4, 48, (6, 12), (1, 1))}
CASES |= {name: FROM_CONV["conv_fwd"](name, conv) for name, conv in FORWARD.items()}
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_gates(backend: Backend, seed: int, name: str, dtype: str) -> None:
    gates(backend, seed, CASES[name], dtype, with_layouts(CASES[name].ndim, grouped=False))


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated(seed: int, name: str) -> None:
    backend = EmulatedBackend(replace(FAMILIES, bwd_data=(FewSources(),), fwd=(FewSources(),)))
    layouts = with_layouts(CASES[name].ndim, grouped=False)[1:]
    # Eight channels last are left to others.
    gates(backend, seed, CASES[name], "float32", layouts[: 2 - (name == "3d")])
