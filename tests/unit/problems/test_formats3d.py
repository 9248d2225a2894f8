"""Ascend's formats, against their definition written out element by element."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.formats3d import ACTIVATION_FORMATS, WEIGHT_FORMATS

NDC1HWC0 = ACTIVATION_FORMATS["NDC1HWC0"]
FRACTAL = WEIGHT_FORMATS["FRACTAL_Z_3D"]
dtypes = st.sampled_from([DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32])
sizes = st.tuples(*[st.integers(1, 3)] * 3)


@given(dtypes, st.integers(1, 2), st.integers(1, 35), sizes)
def test_ndc1hwc0(dtype: DType, batch: int, channels: int, size: tuple[int, int, int]) -> None:
    c0 = 8 if dtype is DType.FLOAT32 else 16
    shape = NDC1HWC0.shape(dtype, batch, channels, size)
    assert shape == (batch, size[0], -(-channels // c0), *size[1:], c0)
    assert NDC1HWC0.spatial(shape) == size
    plain = np.arange(1, batch * channels * np.prod(size) + 1).reshape(batch, channels, *size)
    packed = np.full(shape, -1)
    NDC1HWC0.pack(plain, packed)
    for n, c, d, h, w in product(*map(range, plain.shape)):
        assert packed[n, d, c // c0, h, w, c % c0] == plain[n, c, d, h, w]
    assert np.count_nonzero(packed) == plain.size
    packed[packed == 0] = 99
    np.testing.assert_array_equal(NDC1HWC0.unpack(packed, channels), plain)


@given(dtypes, st.integers(1, 3), st.integers(1, 18), st.integers(1, 18), sizes)
def test_fractal_z_3d(
    dtype: DType, groups: int, k: int, c: int, kernel: tuple[int, int, int]
) -> None:
    """k output and c input channels in each group."""
    c0 = 8 if dtype is DType.FLOAT32 else 16
    c1, n1 = -(-c // c0), -(-k // 16)
    t, r, s = kernel
    shape = FRACTAL.shape(dtype, groups, (groups * k, c, *kernel))
    assert shape == (groups * t * c1 * r * s, n1, 16, c0)
    plain = np.arange(1, groups * k * c * t * r * s + 1).reshape(groups * k, c, *kernel)
    packed = np.full(shape, -1)
    FRACTAL.pack(plain, groups, packed)
    for g, ki, ci, ti, ri, si in product(range(groups), *map(range, (k, c, *kernel))):
        row = (((g * t + ti) * c1 + ci // c0) * r + ri) * s + si
        assert packed[row, ki // 16, ki % 16, ci % c0] == plain[g * k + ki, ci, ti, ri, si]
    assert np.count_nonzero(packed) == plain.size
    packed[packed == 0] = 99
    np.testing.assert_array_equal(FRACTAL.unpack(packed, groups, plain.shape), plain)


@pytest.mark.parametrize("name", ["NCDHW", "NDHWC"])
def test_plain_formats_are_views(name: str) -> None:
    activation, weight = ACTIVATION_FORMATS[name], WEIGHT_FORMATS[name]
    shape = activation.shape(DType.FLOAT64, 2, 3, (4, 5, 6))
    assert shape == ((2, 3, 4, 5, 6) if name == "NCDHW" else (2, 4, 5, 6, 3))
    assert activation.spatial(shape) == (4, 5, 6)
    array = np.zeros(shape)
    assert np.shares_memory(activation.unpack(array, 3), array)
    assert activation.unpack(array, 3).shape == (2, 3, 4, 5, 6)
    assert weight.sizes(shape) == (2, 3, 4, 5, 6)
    plain = np.arange(array.size).reshape(2, 3, 4, 5, 6)
    weight.pack(plain, 1, array)
    np.testing.assert_array_equal(weight.unpack(array, 1, plain.shape), plain)


def test_float64_has_no_packed_format() -> None:
    with pytest.raises(InvalidProblem, match="NDC1HWC0 holds float64; expected one of float16"):
        NDC1HWC0.shape(DType.FLOAT64, 1, 1, (1, 1, 1))
    with pytest.raises(InvalidProblem, match="FRACTAL_Z_3D holds float64"):
        FRACTAL.shape(DType.FLOAT64, 1, (1, 1, 1, 1, 1))


def test_ranks() -> None:
    with pytest.raises(InvalidProblem, match=r"x has shape \(1, 2\); expected 6 dimensions"):
        NDC1HWC0.check_rank("x", (1, 2))
