"""Layers with few channels of the result, by FMA: on every backend and emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.few_gather import FewGather
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.cases import FROM_CONV
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

GEOMETRIES = {
    "mobilenet": Conv(2, 3, 24, (10, 24), (3, 3), 2, 1),
    "resnet": Conv(1, 3, 64, (13, 16), (7, 7), 2, 3),
    "pointwise": Conv(2, 3, 20, (9, 12), (1, 1)),
    "pointwise_strided": Conv(1, 8, 12, (9, 12), (1, 1), 2),
    "column": Conv(2, 1, 32, (33, 5), (5, 1), (3, 1), (2, 0)),
    "dilated": Conv(1, 2, 16, (14, 13), (3, 3), (2, 3), 3, (2, 3)),
    "wide": Conv(1, 3, 72, (9, 12), (3, 3), 2, 1),
    "1d": Conv(2, 4, 17, (700,), (7,), 1, 3),
    "3d": Conv(1, 3, 9, (5, 6, 9), (3, 3, 3), (1, 2, 2), 1),
}
CASES = {name: FROM_CONV["conv_bwd_data"](name, conv) for name, conv in GEOMETRIES.items()}
LAST = {
    "last": Conv(2, 40, 3, (9, 12), (3, 3), 1, 1),
    "last_1d": Conv(1, 32, 1, (300,), (7,), 1, 3),
}
CASES |= {name: FROM_CONV["conv_fwd"](name, conv) for name, conv in LAST.items()}
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


def emulated() -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_data=(FewGather(),), fwd=(FewGather(),)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_gates(backend: Backend, seed: int, name: str, dtype: str) -> None:
    gates(backend, seed, CASES[name], dtype, with_layouts(CASES[name].ndim, grouped=False))


@emulation
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_emulated(seed: int, name: str, dtype: str) -> None:
    gates(emulated(), seed, CASES[name], dtype, with_layouts(CASES[name].ndim, grouped=False)[1:])


@emulation
@pytest.mark.parametrize("name", ["mobilenet", "column", "last"])
def test_emulated_nonfinite(seed: int, name: str) -> None:
    for layout in with_layouts(CASES[name].ndim, grouped=False)[1:]:
        check_rule(emulated(), seed, CASES[name], "float32", layout)
