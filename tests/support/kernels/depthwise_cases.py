"""Depthwise convolutions for the emulated GPU kernels."""

from __future__ import annotations

import pytest

from tests.emulator.backend import EmulatedBackend
from tests.support.kernels.harness import answers, check, drawn
from tests.support.numerics.cases import Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.reference import Padding, Sizes


def layer(
    n: int,
    c: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: int = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    multiplier: int = 1,
) -> Conv:
    return Conv(n, c, c * multiplier, size, kernel, stride, padding, dilation, groups=c)


# Either 16-bit type, each of which is compiled for the emulator, by one of the gates.
either_type = pytest.mark.parametrize(
    ("dtype", "gate"),
    [("bfloat16", "exact"), pytest.param("float16", "bounded", marks=pytest.mark.slow)],
)


def compare(backend: EmulatedBackend, seed: int, case: Case, dtype: str, gate: str) -> None:
    """Channels last."""
    tensors, wanted = drawn(seed, case, dtype, gate)
    found = answers(backend, case, tensors, "NHWC")
    check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}")
