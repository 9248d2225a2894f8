"""The demo's own reference and gate: right by identities, and strict with wrong answers."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from convgrad.demo.gate import bounded, exactly, worst_share
from convgrad.demo.reference import Convolution, MaxPool, fractal_z_3d, ndc1hwc0


def test_the_three_convolutions_are_adjoint(seed: int) -> None:
    rng = np.random.default_rng(seed)
    conv = Convolution(stride=(2, 1), padding=((2, 1), (0, 3)), dilation=(1, 2), groups=2)
    input, weight = rng.normal(size=(2, 6, 8, 5)), rng.normal(size=(4, 3, 3, 2))
    output = conv.forward(input, weight)
    grad_output = rng.normal(size=output.shape)
    pairing = np.vdot(grad_output, output)
    assert np.vdot(conv.grad_input(grad_output, weight, (8, 5)), input) == pytest.approx(pairing)
    assert np.vdot(conv.grad_weight(input, grad_output, (3, 2)), weight) == pytest.approx(pairing)


def test_a_convolution_written_out() -> None:
    conv = Convolution(stride=(1,), padding=((1, 0),), dilation=(1,))
    input, weight = np.array([[[1.0, 2.0, 3.0]]]), np.array([[[10.0, 1.0]]])
    np.testing.assert_array_equal(conv.forward(input, weight), [[[1.0, 12.0, 23.0]]])


def test_a_pooling_written_out() -> None:
    pool = MaxPool(kernel=(2, 2), stride=(1, 2), padding=(0, 1))
    input = np.array([[[[5.0, 1.0, 1.0], [5.0, 7.0, 0.0]]]])
    output, indices = pool.forward(input)
    np.testing.assert_array_equal(output, [[[[5.0, 7.0]]]])
    np.testing.assert_array_equal(indices, [[[[0, 4]]]])
    grad = pool.grad_input(np.array([[[[2.0, 3.0]]]]), indices, (2, 3))
    np.testing.assert_array_equal(grad, [[[[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]]]])


def test_formats_put_every_element_where_ascend_wants_it() -> None:
    activation = np.arange(1, 2 * 20 * 3 * 2 * 2 + 1).reshape(2, 20, 3, 2, 2)
    packed = ndc1hwc0(activation, 16)
    assert packed.shape == (2, 3, 2, 2, 2, 16)
    assert packed[1, 2, 1, 0, 1, 3] == activation[1, 19, 2, 0, 1]
    assert packed.sum() == activation.sum()
    weight = np.arange(1, 18 * 20 * 3 * 2 * 2 + 1).reshape(18, 20, 3, 2, 2)
    blocks = fractal_z_3d(weight, 16)
    assert blocks.shape == (3 * 2 * 2 * 2, 2, 16, 16)
    assert blocks[((2 * 2 + 1) * 2 + 0) * 2 + 1, 1, 1, 3] == weight[17, 19, 2, 0, 1]
    assert blocks.sum() == weight.sum()


def test_the_gate_passes_what_is_right_and_stops_what_is_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    conv = Convolution(stride=(1, 1), padding=((1, 1),) * 2, dilation=(1, 1))
    input = rng.normal(size=(2, 3, 6, 6)).astype(np.float32)
    weight = rng.normal(size=(4, 3, 3, 3)).astype(np.float32)
    expected = bounded(conv.forward, input, weight)
    right = expected.value.astype(np.float32)
    assert worst_share(right, expected) < 1
    # A thousandth of one product of one element, among 288, is too much.
    slightly_wrong = right.copy()
    slightly_wrong[1, 2, 3, 4] += np.float32(1e-3)
    assert worst_share(slightly_wrong, expected) > 1
    poisoned = right.copy()
    poisoned[0, 0, 0, 0] = np.nan
    assert worst_share(poisoned, expected) == np.inf
    assert worst_share(right.astype(np.float64), expected) == np.inf
    assert worst_share(right[:1], expected) == np.inf


def test_where_nothing_is_rounded_nothing_is_allowed() -> None:
    expected = exactly(np.array([1.0, 2.0]), "float32")
    assert worst_share(np.array([1, 2], dtype=np.float32), expected) == 0
    assert worst_share(np.array([1, np.nextafter(np.float32(2), 3)], "float32"), expected) == np.inf
