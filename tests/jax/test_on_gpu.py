"""`Local` on a GPU: XLA's memory and stream, against JAX's own gradients in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import convgrad.jax as ours
from convgrad.jax import _native
from tests.support.jax_layers import LAYERS, NHWC, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU"),
]

# Options, and the shapes of images and weights in NHWC and HWIO.
LARGER: dict[str, Any] = {
    "3x3": ({"padding": "SAME"}, (16, 28, 28, 128), (3, 3, 128, 128)),
    "3x3, strided": (
        {"window_strides": (2, 2), "padding": "SAME"},
        (16, 29, 28, 64),
        (3, 3, 64, 96),
    ),
    "1x1": ({"padding": "VALID"}, (32, 56, 56, 64), (1, 1, 64, 256)),
    "groups": ({"padding": "SAME", "feature_group_count": 4}, (8, 28, 28, 96), (3, 3, 24, 96)),
    "depthwise": (
        {"padding": "SAME", "feature_group_count": 192},
        (8, 28, 28, 192),
        (7, 7, 1, 192),
    ),
}


def cases() -> dict[str, Any]:
    larger = {
        name: ({"window_strides": (1, 1), "dimension_numbers": NHWC, **options}, *shapes)
        for name, (options, *shapes) in LARGER.items()
    }
    return {**LAYERS, **larger}


def value_and_gradients(conv: Any) -> Any:
    def run(grad: jax.Array, x: jax.Array, weight: jax.Array) -> Any:
        y, back = jax.vjp(conv, x, weight)
        return y, *back(grad)

    return jax.jit(run)


def layer(name: str, dtype: str) -> tuple[Any, list[jax.Array], list[Any]]:
    """Return a layer's computation by convgrad, its arguments, and what JAX computes."""
    options, *shapes = cases()[name]
    x, weight = draw(0, *shapes, dtype=dtype)
    jaxs = partial(lax.conv_general_dilated, **options)
    (grad,) = draw(1, jax.eval_shape(jaxs, x, weight).shape, dtype=dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        exact = [np.asarray(each, np.float64) for each in (grad, x, weight)]
        wanted = value_and_gradients(jaxs)(*exact)
    own = value_and_gradients(partial(ours.conv_general_dilated, **options))
    return own, [grad, x, weight], wanted


@pytest.mark.parametrize(("dtype", "share"), [("float32", 2e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("name", cases())
def test_gradients_are_jaxs(name: str, dtype: str, share: float) -> None:
    own, given, wanted = layer(name, dtype)
    program = own.lower(*given).as_text()
    assert "@convgrad_cuda" in program
    assert "callback" not in program
    first = own(*given)
    for a, b in zip(first, wanted, strict=True):
        error = np.asarray(a, np.float64) - np.asarray(b)
        assert np.linalg.norm(error) <= share * np.linalg.norm(b)
    for _ in range(5):  # by native code, in other memory
        assert all(map(jnp.array_equal, own(*given), first))


def test_python_takes_no_part_in_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    own, given, _ = layer("3x3", "bfloat16")
    first = own(*given)
    monkeypatch.setattr(_native, "_prepared", None)  # Python would fail
    assert all(map(jnp.array_equal, own(*given), first))


def test_threads_run_one_program() -> None:
    own, given, _ = layer("groups", "bfloat16")
    every = [[each * scale for each in given] for scale in (1, 2, 3, 4)]
    wanted = [own(*each) for each in every]

    def work(number: int) -> bool:
        for _ in range(50):
            found = own(*every[number])
        return all(map(jnp.array_equal, found, wanted[number]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_scan_of_checkpoints() -> None:
    x, weights = draw(5, (4, 14, 14, 32), (6, 3, 3, 32, 32), dtype="float32")

    def loss(conv: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        @jax.checkpoint
        def body(h: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(conv(h, weight * 0.1, (1, 1), "SAME", dimension_numbers=NHWC)), None

        return jnp.sum(jnp.sin(lax.scan(body, x, weights)[0]))

    found, wanted = (
        jax.jit(jax.grad(partial(loss, conv), (0, 1)))(x, weights)
        for conv in (
            ours.conv_general_dilated,
            partial(lax.conv_general_dilated, precision="highest"),
        )
    )
    for a, b in zip(found, wanted, strict=True):
        assert jnp.linalg.norm(a - b) <= 2e-5 * jnp.linalg.norm(b)
