"""The two gates pass what is right and catch what is wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.support.numerics.arrays import DTYPES, integers, normals, rng_for
from tests.support.numerics.bounds import (
    U,
    assert_bounded,
    assert_exact,
    assert_same_bits,
    limits,
    rounded,
)
from tests.support.numerics.reference import Reference, conv_fwd

BF16 = np.dtype(ml_dtypes.bfloat16)


def made(value: float, magnitude: float, terms: int = 4) -> Reference:
    shape = (2, 2)
    return Reference(
        np.full(shape, value), np.full(shape, magnitude), np.full(shape, terms, np.int64)
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rounding_is_to_the_nearest_of_all(dtype: np.dtype[np.generic], seed: int) -> None:
    """No representable neighbour is nearer than the one chosen."""
    rng = rng_for(seed, dtype.name)
    values = rng.standard_normal(2000) * 2.0 ** rng.integers(-30, 15, 2000)
    near = rounded(values, dtype)
    assert (near.astype(dtype).astype(np.float64) == near).all()
    for side in (-np.inf, np.inf):
        with np.errstate(under="ignore"):
            other = np.nextafter(near.astype(dtype), dtype.type(side)).astype(np.float64)
        assert (np.abs(near - values) <= np.abs(other - values)).all()
    spacing = float(limits(dtype).smallest_normal)
    normal = np.abs(values) >= spacing
    assert (np.abs(near - values) <= U[dtype.name] * np.abs(values))[normal].all()


def test_bfloat16_is_rounded_once() -> None:
    """Through float32 this tie would be made first, and then broken the wrong way."""
    value = 1.0 + 2.0**-8 + 2.0**-30
    assert rounded(np.array(value), BF16) == 1.0 + 2.0**-7
    assert np.float32(value).astype(BF16) == 1.0
    assert rounded(np.array([1e39, -1e39, 2.0**-134]), BF16).tolist() == [np.inf, -np.inf, 0.0]


def test_the_bounded_gate_has_the_width_it_says() -> None:
    ref = made(1.0, 8.0)
    allowed = 2.0**-24 + 4 * 2.0**-24 * 8
    inside, outside = np.float32(1 + 0.98 * allowed), np.float32(1 + 1.1 * allowed)
    assert assert_bounded(np.full((2, 2), inside), ref) == pytest.approx(0.98, rel=0.05)
    wrong = np.ones((2, 2), np.float32)
    wrong[1, 0] = outside
    with pytest.raises(AssertionError, match=r"worst at \(1, 0\)"):
        assert_bounded(wrong, ref)


def test_a_dropped_term_fails_the_exact_gate_where_a_tolerance_would_not(seed: int) -> None:
    rng = rng_for(seed)
    x, w = integers(rng, (1, 64, 9), np.dtype(np.float16)), np.ones((1, 64, 3))
    x[0, 0, 4] = 1
    whole = conv_fwd(x, w, padding=1)
    x[0, 0, 4] = 0
    dropped = conv_fwd(x, w, padding=1).value.astype(np.float32)
    with pytest.raises(AssertionError, match="3 of 9 elements differ"):
        assert_exact(dropped, whole)
    assert_exact(whole.value.astype(np.float16), whole)


def test_the_exact_gate_refuses_sums_that_round() -> None:
    with pytest.raises(AssertionError, match="not exact"):
        assert_exact(np.ones((2, 2), np.float32), made(1.0, 2.0**24))


@pytest.mark.parametrize(
    ("found", "wanted", "right"),
    [
        (np.inf, 70000.0, True),
        (65504.0, 70000.0, False),
        (np.inf, 65519.99, True),  # the allowance reaches over the threshold, 65520
        (65504.0, 65521.0, True),
        (np.inf, 60000.0, False),
        (-np.inf, 70000.0, False),
        (np.inf, np.inf, True),
        (-np.inf, np.inf, False),
        (np.nan, np.nan, True),
        (0.0, np.nan, False),
        (np.nan, 0.0, False),
        (65504.0, np.inf, False),
    ],
)
def test_overflow_and_non_finite_values(found: float, wanted: float, right: bool) -> None:
    ref = made(wanted, abs(wanted))
    out = np.full((2, 2), found, np.float16)
    if right:
        assert_bounded(out, ref)
    else:
        with pytest.raises(AssertionError, match="worst at"):
            assert_bounded(out, ref)


def test_subnormals_are_held_to_their_spacing() -> None:
    half = made(2.5 * 2.0**-24, 2.0**-22)
    assert_bounded(np.full((2, 2), 2.0**-23, np.float16), half)
    with pytest.raises(AssertionError):
        assert_bounded(np.zeros((2, 2), np.float16), half)


def test_bits_are_bits() -> None:
    a = np.array([0.0, np.nan], np.float32)
    assert_same_bits(a, a.copy())
    with pytest.raises(AssertionError, match="flat index 0"):
        assert_same_bits(a, np.array([-0.0, np.nan], np.float32))


def test_normals_survive_their_dtype(seed: int) -> None:
    drawn = normals(rng_for(seed), (1000,), np.dtype(np.float16))
    assert np.isfinite(drawn).all()
    assert 0 < (np.abs(drawn.astype(np.float64)) > 10).sum() < 100
