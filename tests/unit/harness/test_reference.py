"""The reference is right: against scalar loops, finite differences, linearity and adjointness."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.numerics import reference
from tests.support.numerics.arrays import rng_for
from tests.support.numerics.geometries import CONVS, Conv

Float = NDArray[np.float64]
F64 = np.dtype(np.float64)

# Small enough for Python loops over every scalar product.
TINY = {
    "2d": Conv(2, 4, 6, (5, 4), (3, 2), (2, 1), ((1, 0), (2, 1)), (1, 2), 2),
    "2d_stride_beyond_kernel": Conv(1, 2, 3, (7, 8), (2, 1), 3),
    "2d_shared_factor": Conv(1, 2, 2, (8, 7), (2, 2), 2, 3, 4),
    "2d_padding_beyond_the_kernel": Conv(1, 1, 2, (2, 3), (2, 2), 1, 3),
    "1d": Conv(2, 3, 3, (9,), (4,), 2, ((3, 1),), 1, 3),
    "3d": Conv(1, 2, 4, (3, 4, 3), (2, 3, 1), (1, 2, 2), ((0, 1), (1, 1), (0, 0)), 1, 2),
}


@pytest.fixture(params=TINY, ids=str)
def conv(request: pytest.FixtureRequest) -> Conv:
    return TINY[request.param]


def drawn(conv: Conv, seed: int) -> tuple[Float, Float, Float]:
    rng = rng_for(seed, conv)
    return (
        rng.standard_normal(conv.input_shape),
        rng.standard_normal(conv.weight_shape),
        rng.standard_normal(conv.output_shape),
    )


def geometry(conv: Conv) -> dict[str, Any]:
    return {
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
    }


def triples(conv: Conv) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Every (input, output, weight) element that the definition multiplies, one at a time."""
    n_dims = conv.ndim
    s = reference.per_dimension(conv.stride, n_dims)
    d = reference.per_dimension(conv.dilation, n_dims)
    pad = reference.padding_pairs(conv.padding, n_dims)
    c_group, k_group = conv.c // conv.groups, conv.k // conv.groups
    met = []
    for n, k in itertools.product(range(conv.n), range(conv.k)):
        for o in itertools.product(*map(range, conv.output_size)):
            for c, *r in itertools.product(range(c_group), *map(range, conv.kernel)):
                i = tuple(o[a] * s[a] + r[a] * d[a] - pad[a][0] for a in range(n_dims))
                if all(0 <= i[a] < conv.size[a] for a in range(n_dims)):
                    met.append(((n, k // k_group * c_group + c, *i), (n, k, *o), (k, c, *r)))
    return met


def test_every_scalar_product_of_the_definition(conv: Conv, seed: int) -> None:
    x, w, dy = drawn(conv, seed)
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    s, n = np.zeros_like(dx), np.zeros(dx.shape, np.int64)
    for i, o, r in triples(conv):
        y[o] += x[i] * w[r]
        dx[i] += dy[o] * w[r]
        dw[r] += dy[o] * x[i]
        s[i] += abs(dy[o] * w[r])
        n[i] += 1
    kwargs = geometry(conv)
    assert reference.conv_fwd(x, w, **kwargs).value == pytest.approx(y, rel=1e-13, abs=1e-13)
    found = reference.conv_bwd_data(dy, w, conv.size, **kwargs)
    assert found.value == pytest.approx(dx, rel=1e-13, abs=1e-13)
    assert found.magnitude == pytest.approx(s, rel=1e-13)
    assert (found.terms == n).all()
    found = reference.conv_bwd_weight(x, dy, conv.kernel, **kwargs)
    assert found.value == pytest.approx(dw, rel=1e-13, abs=1e-13)


def test_the_terms_of_each_element(conv: Conv) -> None:
    """With ones for tensors, value, S and the number of terms are one and the same."""
    x, w, dy = np.ones(conv.input_shape), np.ones(conv.weight_shape), np.ones(conv.output_shape)
    for found in (
        reference.conv_fwd(x, w, **geometry(conv)),
        reference.conv_bwd_data(dy, w, conv.size, **geometry(conv)),
        reference.conv_bwd_weight(x, dy, conv.kernel, **geometry(conv)),
        reference.grad_bias(dy),
    ):
        assert (found.value == found.terms).all()
        assert (found.magnitude == found.terms).all()


def test_gradients_are_finite_differences_of_the_forward(conv: Conv, seed: int) -> None:
    """The loss sum(y * dy) is linear in x and in w, so a difference quotient has no step error."""
    x, w, dy = drawn(conv, seed)
    b = rng_for(seed, conv, "bias").standard_normal(conv.k)
    kwargs = geometry(conv)

    def loss(x: Float, w: Float, b: Float) -> float:
        return float((reference.conv_fwd(x, w, b, **kwargs).value * dy).sum())

    dx = reference.conv_bwd_data(dy, w, conv.size, **kwargs).value
    dw = reference.conv_bwd_weight(x, dy, conv.kernel, **kwargs).value
    db = reference.grad_bias(dy).value
    rng = rng_for(seed, conv, "places")
    for tensor, gradient, place in ((x, dx, 0), (w, dw, 1), (b, db, 2)):
        for flat in rng.choice(tensor.size, min(tensor.size, 12), replace=False):
            at = np.unravel_index(flat, tensor.shape)
            step = np.zeros_like(tensor)
            step[at] = 0.5
            arguments = [x, w, b]
            arguments[place] = tensor + step
            up = loss(*arguments)
            arguments[place] = tensor - step
            assert up - loss(*arguments) == pytest.approx(gradient[at], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", CONVS)
def test_adjointness(name: str, seed: int) -> None:
    """<dy, conv(x, w)> = <bwd_data(dy, w), x> = <bwd_weight(x, dy), w>."""
    conv = CONVS[name]
    x, w, dy = drawn(conv, seed)
    kwargs = geometry(conv)
    forward = reference.conv_fwd(x, w, **kwargs)
    scale = float((forward.magnitude * np.abs(dy)).sum())
    a = float((forward.value * dy).sum())
    b = float((reference.conv_bwd_data(dy, w, conv.size, **kwargs).value * x).sum())
    c = float((reference.conv_bwd_weight(x, dy, conv.kernel, **kwargs).value * w).sum())
    assert abs(a - b) <= 1e-13 * scale
    assert abs(a - c) <= 1e-13 * scale


def test_linearity(conv: Conv, seed: int) -> None:
    x, w, dy = drawn(conv, seed)
    other, _, _ = drawn(conv, seed + 1)
    kwargs = geometry(conv)

    def forward(x: Float) -> Float:
        return reference.conv_fwd(x, w, **kwargs).value

    def grad_weight(x: Float) -> Float:
        return reference.conv_bwd_weight(x, dy, conv.kernel, **kwargs).value

    for f in (forward, grad_weight):
        assert f(2 * x - 3 * other) == pytest.approx(2 * f(x) - 3 * f(other), rel=1e-9, abs=1e-9)


def test_infinities_reach_only_what_they_meet() -> None:
    """Zero times infinity happens where the definition multiplies them, never in the padding."""
    x = np.zeros((1, 4, 5))
    x[0, 0, 0] = np.inf
    w = np.ones((4, 2, 3))
    out = reference.conv_fwd(x, w, padding=1, groups=2).value
    assert np.isinf(out[0, :2, :2]).all()
    assert np.isfinite(out[0, :2, 2:]).all()
    assert np.isfinite(out[0, 2:]).all()


def test_epilogue_with_beta_zero_reads_nothing() -> None:
    grad = reference.grad_bias(np.ones((2, 3, 4)))
    spoilt = np.full(3, np.nan)
    assert (reference.epilogue(grad, 2.0, 0.0, spoilt).value == 16.0).all()
    assert np.isnan(reference.epilogue(grad, 2.0, 1.0, spoilt).value).all()


def test_transposed_sizes() -> None:
    """out = (D - 1)*s - front - back + d*(k - 1) + output_padding + 1."""
    x, w = np.ones((1, 2, 3, 4, 5)), np.ones((2, 3, 3, 1, 2))
    out = reference.conv_transpose(
        x, w, np.arange(3.0), stride=2, padding=((1, 0), (0, 0), (0, 1)), output_padding=(1, 0, 1)
    )
    assert out.value.shape == (1, 3, 7, 7, 10)


def test_fused_is_two_convolutions(seed: int) -> None:
    conv = TINY["2d"]
    x, w, _ = drawn(conv, seed)
    w1 = rng_for(seed, "second").standard_normal((3, conv.k, 1, 1))
    out = reference.fused(
        x, w, w1, conv0=geometry(conv), conv1={}, activation0="relu", activation1="silu"
    )
    middle = np.maximum(reference.conv_fwd(x, w, **geometry(conv)).value, 0)
    y = np.einsum("kc,nchw->nkhw", w1[:, :, 0, 0], middle)
    assert out.value == pytest.approx(y / (1 + np.exp(-y)), rel=1e-12, abs=1e-12)
