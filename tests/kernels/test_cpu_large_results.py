"""Large results, which the CPU writes past its caches, have the bits of each image's alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.kernels.cpu_levels import BEST, LEVELS
from tests.support.kernels.harness import answers, drawn
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd
from tests.support.numerics.geometries import Conv

# Of eight images of about 1 MB; odd sizes, and blocks of columns that overlap.
IMAGES = 8
STRIDED = Conv(IMAGES, 48, 48, (75, 77), (3, 3), stride=2, padding=1, groups=48)
PLAIN = Conv(IMAGES, 16, 16, (130, 131), (3, 3), padding=1, groups=16)

GROUPED = Conv(IMAGES, 64, 64, (61, 63), (3, 3), stride=2, padding=1, groups=8)


@pytest.mark.parametrize("level", [BEST, *LEVELS])
@pytest.mark.parametrize(
    ("make", "conv"), [(conv_bwd_data, STRIDED), (conv_fwd, PLAIN), (conv_bwd_data, GROUPED)]
)
def test_large_results(
    seed: int, make: Callable[[str, Conv], Case], conv: Conv, level: str
) -> None:
    case, alone = make("images", conv), make("image", replace(conv, n=1))
    tensors, _ = drawn(seed, case, "float32", "bounded")
    backend = CpuBackend(threads=2, level=level)
    (found,) = answers(backend, case, tensors, "NHWC").values()
    assert found.nbytes >= 6 << 20
    first = next(iter(tensors))
    for n in range(IMAGES):
        image = {**tensors, first: tensors[first][n : n + 1]}
        (wanted,) = answers(backend, alone, image, "NHWC").values()
        assert_same_bits(found[n : n + 1], wanted, f"seed {seed}, {level}, image {n}")
