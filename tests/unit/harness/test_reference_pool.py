"""The reference of max pooling and of Ascend's formats is right."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.support.numerics import reference_pool as pooling
from tests.support.numerics.arrays import rng_for
from tests.support.numerics.geometries import POOLS
from tests.support.numerics.reference import padding_pairs, per_dimension, pool_output_size


@pytest.mark.parametrize("name", POOLS)
def test_maxima_by_scalar_loops(name: str, seed: int) -> None:
    """One element at a time, with Python's own max over (value, earliest)."""
    pool = POOLS[name]
    x = rng_for(seed, name).integers(-4, 5, pool.input_shape).astype(np.float64)
    output, indices = pooling.maxpool_fwd(
        x,
        pool.kernel,
        stride=pool.stride,
        padding=pool.padding,
        dilation=pool.dilation,
        ceil_mode=pool.ceil_mode,
    )
    ndim = pool.ndim
    kernel, d = per_dimension(pool.kernel, ndim), per_dimension(pool.dilation, ndim)
    s = kernel if pool.stride is None else per_dimension(pool.stride, ndim)
    pad = padding_pairs(pool.padding, ndim)
    rng = rng_for(seed, name, "places")
    for flat in rng.choice(output.size, min(output.size, 60), replace=False):
        n, c, *o = (int(a) for a in np.unravel_index(flat, output.shape))
        places = []
        for r in itertools.product(*map(range, kernel)):
            at = tuple(o[a] * s[a] + r[a] * d[a] - pad[a][0] for a in range(ndim))
            if all(0 <= at[a] < pool.size[a] for a in range(ndim)):
                places.append(at)
        best = max(places, key=lambda at: float(x[(n, c, *at)]))
        assert output[(n, c, *o)] == x[(n, c, *best)]
        assert indices[(n, c, *o)] == np.ravel_multi_index(best, pool.size)


def test_a_nan_wins_and_of_several_the_last() -> None:
    x = np.array([[[[1.0, np.nan, 3.0, np.nan], [0.0, 2.0, 9.0, 9.0]]]])
    output, indices = pooling.maxpool_fwd(x, 2)
    assert np.isnan(output).all()
    assert indices.ravel().tolist() == [1, 3]
    _, indices = pooling.maxpool_fwd(np.full((1, 1, 2, 2), np.nan), 2)
    assert indices.ravel().tolist() == [3]


def test_the_first_of_equals_wins_and_minus_infinity_too() -> None:
    _, indices = pooling.maxpool_fwd(np.full((1, 1, 3, 3), -np.inf), 3, stride=2, padding=1)
    assert indices.ravel().tolist() == [0, 1, 3, 4]


def test_a_window_without_a_valid_element_is_an_error() -> None:
    with pytest.raises(ValueError, match="no valid element"):
        pooling.maxpool_fwd(
            np.zeros((1, 1, 1, 9)), (2, 1), stride=1, padding=(1, 0), dilation=(2, 1)
        )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "expected"),
    [
        (5, 2, 2, 0, 3),  # the last window hangs over
        (5, 2, 3, 1, 2),  # the third would start in the right padding, at 6 >= 5 + 1
        (4, 2, 2, 1, 3),
        (7, 3, 2, 1, 4),
    ],
)
def test_ceil_mode(size: int, kernel: int, stride: int, padding: int, expected: int) -> None:
    assert pool_output_size((size,), (kernel,), stride, padding, 1, True) == (expected,)


def test_the_gradient_gathers_every_window(seed: int) -> None:
    """<dy, x[indices]> = <grad_input, x>, and nothing is lost."""
    pool = POOLS["overlapping"]
    rng = rng_for(seed, "gather")
    x, dy = rng.standard_normal(pool.input_shape), rng.standard_normal(pool.output_shape)
    output, indices = pooling.maxpool_fwd(x, 3, stride=2, padding=1)
    grad = pooling.maxpool_bwd(dy, indices, pool.size)
    assert float((grad.value * x).sum()) == pytest.approx(float((dy * output).sum()))
    assert int(grad.terms.sum()) == output.size
    assert grad.magnitude.sum() == pytest.approx(np.abs(dy).sum())


@pytest.mark.parametrize("c0", [16, 8])
@pytest.mark.parametrize("channels", [1, 8, 16, 19, 33])
def test_ndc1hwc0(c0: int, channels: int, seed: int) -> None:
    x = rng_for(seed, c0, channels).standard_normal((2, channels, 2, 3, 4))
    packed = pooling.pack_ndc1hwc0(x, c0)
    assert packed.shape == (2, 2, math.ceil(channels / c0), 3, 4, c0)
    assert (pooling.unpack_ndc1hwc0(packed, channels) == x).all()
    assert np.count_nonzero(packed) == np.count_nonzero(x)


@pytest.mark.parametrize(
    ("k", "c", "groups", "c0"), [(16, 16, 1, 16), (17, 3, 1, 8), (6, 5, 3, 16)]
)
def test_fractal_z_3d(k: int, c: int, groups: int, c0: int, seed: int) -> None:
    """Against the definition as reshapes: pad, view (N1, N0, D, H, W, C1, C0), transpose."""
    weight = rng_for(seed, k, c).standard_normal((k, c, 2, 3, 2))
    packed = pooling.pack_fractal_z_3d(weight, groups, c0)
    k_group = k // groups
    n1, c1 = math.ceil(k_group / 16), math.ceil(c / c0)
    parts = []
    for g in range(groups):
        padded = np.zeros((n1 * 16, 2, 3, 2, c1 * c0))
        padded[:k_group, ..., :c] = np.moveaxis(weight[g * k_group : (g + 1) * k_group], 1, -1)
        view = padded.reshape(n1, 16, 2, 3, 2, c1, c0)
        parts.append(view.transpose(2, 5, 3, 4, 0, 1, 6).reshape(-1, n1, 16, c0))
    assert (packed == np.concatenate(parts)).all()
    assert (pooling.unpack_fractal_z_3d(packed, weight.shape, groups) == weight).all()
