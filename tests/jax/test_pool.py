"""`max_pool` and `avg_pool` against `lax.reduce_window`, value and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import convgrad.jax as ours

POOLINGS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 9, 3), {"window_shape": (3,), "strides": (2,), "padding": [(1, 2)]}),
    ((2, 9, 8, 3), {"window_shape": (3, 2), "strides": (2, 1), "padding": "SAME"}),
    ((2, 3, 9, 8), {"window_shape": (2, 3), "strides": (2, 3), "channels_last": False}),
    ((1, 4, 5, 6, 2), {"window_shape": (2, 2, 3)}),
]


def windows(
    kind: str,
    x: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    count_include_pad: bool = True,
    channels_last: bool = True,
) -> jax.Array:
    def by_rank(spatial: Sequence[Any], other: Any) -> tuple[Any, ...]:
        return (other, *spatial, other) if channels_last else (other, other, *spatial)

    pads = padding if isinstance(padding, str) else by_rank(padding, (0, 0))
    steps = by_rank(strides or (1,) * len(window_shape), 1)
    reduce = partial(
        lax.reduce_window,
        window_dimensions=by_rank(window_shape, 1),
        window_strides=steps,
        padding=pads,
    )
    if kind == "max":
        return reduce(x, -np.inf, lax.max)
    total = reduce(x, 0.0, lax.add)
    if count_include_pad:
        return total / np.prod(window_shape)
    return total / reduce(jnp.ones_like(x), 0.0, lax.add)


def derivatives(pool: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Any]:
    first = jax.grad(lambda x: jnp.sum(jnp.sin(pool(x))))
    second = jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))
    return lambda x: (pool(x), first(x), second(x))


@pytest.mark.parametrize("pool", [ours.max_pool, ours.avg_pool])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("batch", [(), (2, 3), (0, 2)])
def test_any_number_of_batch_dimensions(
    pool: Callable[..., jax.Array], channels_last: bool, batch: tuple[int, ...]
) -> None:
    image = (5, 6, 4) if channels_last else (4, 5, 6)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((*batch, *image)), jnp.float32)
    of_images = partial(pool, window_shape=(2, 3), channels_last=channels_last)
    wanted = of_images(x.reshape(np.prod(batch, dtype=int), *image))
    found = of_images(x)
    assert found.shape[: len(batch)] == batch
    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)
    assert jax.grad(lambda x: of_images(x).sum())(x).shape == x.shape


@pytest.mark.parametrize(("shape", "arguments"), POOLINGS)
@pytest.mark.parametrize("kind", ["max", "avg", "avg of what is there"])
def test_value_and_derivatives_are_jaxs(
    kind: str, shape: tuple[int, ...], arguments: dict[str, Any]
) -> None:
    if kind == "avg of what is there":
        arguments = {**arguments, "count_include_pad": False}
    kind = kind[:3]
    own = partial(ours.max_pool if kind == "max" else ours.avg_pool, **arguments)
    x = jax.random.normal(jax.random.key(0), (2, *shape), jnp.float64)
    found = jax.jit(jax.vmap(derivatives(own)))(x)
    wanted = jax.jit(jax.vmap(derivatives(partial(windows, kind, **arguments))))(x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(own(x[0]), found[0][0], rtol=1e-12)


def test_bfloat16() -> None:
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 3), jnp.bfloat16)
    found = ours.max_pool(x, (2, 2), (2, 2))
    assert found.dtype == jnp.bfloat16
    assert (found == windows("max", x.astype(jnp.float32), (2, 2), (2, 2))).all()


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    grad = jax.grad(lambda x: jnp.sum(ours.max_pool(x, (2, 2), (2, 2))))(jnp.zeros((1, 2, 4, 1)))
    assert grad[0, :, :, 0].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("pool", [ours.max_pool, ours.avg_pool])
def test_empty_arrays_need_no_backend(pool: Callable[..., jax.Array]) -> None:
    assert pool(jnp.zeros((0, 4, 4, 2)), (2, 2)).shape == (0, 3, 3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window_shape": (2,), "strides": (1, 1)}, "the window 1 and the strides 2"),
        ({"window_shape": (2, 2, 2, 2)}, "the window 4 and the strides"),
        ({"window_shape": (2, 2), "padding": [(2, 0), (0, 0)]}, "expected 0 to 1"),
        ({"window_shape": (2, 2), "padding": [(-1, 0), (0, 0)]}, "expected 0 to 1"),
    ],
)
def test_what_cannot_be_computed_is_said_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours.max_pool(jnp.zeros((1, 4, 4, 1)), **arguments)
