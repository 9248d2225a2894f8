"""Long float32 sums on the CPU err no more than if they were summed in blocks.

A chain of n additions of independent terms errs, relative to its result, with the square root of n;
sqrt(n) chains of sqrt(n) terms, added up, with the fourth root. So a kernel whose sums are
single chains fails here, though it passes the bounds of `convgrad.check`, which hold for any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.kernels.cpu_levels import BEST, LEVELS
from tests.support.kernels.harness import answers, drawn
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd, grouped_conv_bwd_weight
from tests.support.numerics.geometries import Conv
from tests.support.numerics.reference import Reference

# The rms error of rounding to float32, relative to the value: 2^-24 / sqrt(3) just above a power of
# two, half as much just below the next; on average over their logarithms 0.42 * 2^-24.
ROUNDING = 0.42 * 2.0**-24
# Kernels may err twice as much as sqrt(n) chains of sqrt(n) terms.
MARGIN = 2.0

DENSE = Conv(1, 256, 256, (7, 7), (3, 3), padding=1)
WIDE = Conv(8, 32, 32, (28, 28), (3, 3), padding=1)
LAST = Conv(1, 128, 3, (16, 16), (5, 5), padding=2)
FIRST = Conv(4, 3, 16, (96, 96), (3, 3), padding=1)
GROUPED = Conv(16, 16, 16, (40, 40), (3, 3), padding=1, groups=4)
DEPTHWISE = Conv(4, 16, 16, (64, 64), (3, 3), padding=1, groups=16)
LINE = Conv(1, 24, 24, (9000,), (3,), padding=1)
POINTS = Conv(1, 2048, 32, (5, 5), (1, 1))
CASES = [
    conv_fwd("dense", DENSE),
    conv_bwd_data("dense", DENSE),
    conv_fwd("points", POINTS),
    conv_fwd("last", LAST),
    conv_bwd_data("first", Conv(1, 3, 128, (16, 16), (5, 5), padding=2)),
    grouped_conv_bwd_weight("dense", WIDE),
    grouped_conv_bwd_weight("line", LINE),
    grouped_conv_bwd_weight("first", FIRST),
    grouped_conv_bwd_weight("grouped", GROUPED),
    grouped_conv_bwd_weight("depthwise", DEPTHWISE),
]
LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC")}


@pytest.mark.parametrize("level", [BEST, *LEVELS])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_long_sums(seed: int, case: Case, level: str) -> None:
    tensors, wanted = drawn(seed, case, "float32", "bounded")
    backend = CpuBackend(threads=1, level=level)
    for layout in LAYOUTS[case.ndim]:
        for name, found in answers(backend, case, tensors, layout).items():
            reference = wanted[name]
            assert isinstance(reference, Reference)
            error = found - reference.value
            relative = np.sqrt(np.mean(error**2) / np.mean(reference.value**2))
            allowed = MARGIN * ROUNDING * np.mean(reference.terms) ** 0.25
            assert relative <= allowed, f"seed {seed}, {case.id} {name} {layout}: {relative:.1e}"


# Taps far apart, so that tiles of a row skip different ones in the padding.
DILATED = Conv(2, 48, 40, (19, 90), (3, 5), padding=(20, 70), dilation=(20, 35))


@pytest.mark.parametrize("conv", [DENSE, DILATED], ids=["dense", "dilated"])
@pytest.mark.parametrize("make", [conv_fwd, conv_bwd_data])
def test_blocks_depend_on_neither_threads_nor_batch(
    seed: int, make: Callable[[str, Conv], Case], conv: Conv
) -> None:
    batch = replace(conv, n=2)
    tensors, _ = drawn(seed, make("both", batch), "float32", "bounded")
    for layout in LAYOUTS[2]:
        (wanted,) = answers(CpuBackend(threads=1), make("both", batch), tensors, layout).values()
        (found,) = answers(CpuBackend(threads=7), make("both", batch), tensors, layout).values()
        assert_same_bits(found, wanted, f"seed {seed}, {layout}, 7 threads")
        first = next(iter(tensors))
        for image in range(2):
            alone = {**tensors, first: tensors[first][image : image + 1]}
            case = make("alone", replace(conv, n=1))
            (found,) = answers(CpuBackend(threads=2), case, alone, layout).values()
            assert_same_bits(found, wanted[image : image + 1], f"seed {seed}, {layout}, {image}")
