"""Layouts: shapes there and back, and canonical views that share memory."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad.errors import InvalidProblem
from convgrad_service.problems.layouts import (
    LAYOUTS,
    Layout,
    activation_shape,
    activation_view,
    weight_shape,
    weight_view,
)

N, G, C, K = 2, 3, 6, 12
SIZE, KERNEL = (4, 5, 7), (1, 2, 3)
EVERY = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)


def test_the_names_of_the_design() -> None:
    assert set(LAYOUTS) == {
        *("NCW", "NWC", "NGCW", "NWGC", "GNWC"),
        *("NCHW", "NHWC", "NGCHW", "NHWGC", "GNHWC"),
        *("NCDHW", "NDHWC", "NGCDHW", "NDHWGC", "GNDHWC"),
    }


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("NCHW", "KCRS"),
        ("NHWC", "KRSC"),
        ("NGCHW", "GKCRS"),
        ("NHWGC", "GKRSC"),
        ("GNHWC", "GKRSC"),
        ("NCW", "KCS"),
        ("GNWC", "GKSC"),
        ("NDHWC", "KTRSC"),
        ("NGCDHW", "GKCTRS"),
    ],
)
def test_weights_follow_activations(name: str, weight: str) -> None:
    assert Layout.named(name).weight == weight


def test_shapes() -> None:
    nhwgc = Layout.named("NHWGC")
    assert activation_shape(nhwgc, N, G, C, SIZE[1:]) == (2, 5, 7, 3, 2)
    assert weight_shape(nhwgc, G, C, K, KERNEL[1:]) == (3, 4, 2, 3, 2)
    nhwc = Layout.named("NHWC")
    assert activation_shape(nhwc, N, G, C, SIZE[1:]) == (2, 5, 7, 6)
    assert weight_shape(nhwc, G, C, K, KERNEL[1:]) == (12, 2, 3, 2)


@EVERY
def test_shapes_there_and_back(layout: Layout) -> None:
    groups = G if layout.grouped else None
    size, kernel = SIZE[-layout.ndim :], KERNEL[-layout.ndim :]
    shape = activation_shape(layout, N, G, C, size)
    assert len(shape) == layout.rank
    assert layout.activation_sizes(shape) == (N, groups, C, size)
    shape = weight_shape(layout, G, C, K, kernel)
    assert layout.weight_sizes(shape) == (groups, K, C // G, kernel)


@EVERY
def test_views_write_through(layout: Layout) -> None:
    """Element (n, c, spatial) of the canonical view is the one that the layout's name says."""
    size = SIZE[-layout.ndim :]
    array = np.zeros(activation_shape(layout, N, G, C, size))
    view = activation_view(array, layout, G)
    assert view.shape == (N, G, C // G, *size)
    assert np.shares_memory(view, array)
    view[(1, 2, 1, *[extent - 1 for extent in size])] = 5
    at = dict(zip("DHW"[-layout.ndim :], (extent - 1 for extent in size), strict=True))
    at |= {"N": 1, "G": 2, "C": 1 if layout.grouped else 2 * (C // G) + 1}
    assert array[tuple(at[letter] for letter in layout.activation)] == 5
    assert np.count_nonzero(array) == 1


@EVERY
def test_weight_views_write_through(layout: Layout) -> None:
    kernel = KERNEL[-layout.ndim :]
    array = np.zeros(weight_shape(layout, G, C, K, kernel))
    view = weight_view(array, layout, G)
    assert view.shape == (G, K // G, C // G, *kernel)
    view[(2, 3, 1, *[extent - 1 for extent in kernel])] = 5
    at = dict(zip("TRS"[-layout.ndim :], (extent - 1 for extent in kernel), strict=True))
    at |= {"G": 2, "C": 1, "K": 3 if layout.grouped else 2 * (K // G) + 3}
    assert array[tuple(at[letter] for letter in layout.weight)] == 5
    assert np.count_nonzero(array) == 1


@EVERY
def test_views_of_views(layout: Layout) -> None:
    """A slice, or a read-only array, is as good: no copy is made on the way."""
    size = SIZE[-layout.ndim :]
    array = np.arange(2.0 * N * C * np.prod(size)).reshape(
        activation_shape(layout, 2 * N, G, C, size)
    )
    part = array[(slice(None),) * layout.axis("N") + (slice(1, None, 2),)]
    view = activation_view(part, layout, G)
    assert np.shares_memory(view, array)
    np.testing.assert_array_equal(view[0], activation_view(array, layout, G)[1])
    array.flags.writeable = False
    assert not activation_view(array, layout, G).flags.writeable


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        (None, (1, 2), r"x has shape \(1, 2\); expected 3, 4 or 5 dimensions"),
        (None, (1,) * 6, r"x has shape .*; expected 3, 4 or 5 dimensions \(NCW, NCHW or NCDHW\)"),
        ("NHWC", (1, 2, 3), r"x has shape \(1, 2, 3\); expected 4 dimensions \(NHWC\) in layout"),
        ("nchw", (1, 1, 1, 1), "layout is 'nchw'; expected one of NCW, NWC"),
        ("NHWGC", (1, 1, 1, 1), r"expected 5 dimensions \(NHWGC\)"),
    ],
)
def test_refusals(name: str | None, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InvalidProblem, match=sentence):
        Layout.of_tensor(name, "x", shape)


def test_rank_of_an_operation() -> None:
    with pytest.raises(InvalidProblem, match="layout NHWC has 2 spatial dimensions; expected 3"):
        Layout.parse("NHWC", 3)
    assert Layout.parse(None, 1).name == "NCW"
