"""`conv_general_dilated` against JAX's own, value and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import convgrad.jax as ours
from tests.support.jax_layers import LAYERS, draw


def gradients(conv: Callable[..., jax.Array]) -> Callable[..., Any]:
    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(conv(x, weight)))

    return jax.grad(loss, argnums=(0, 1))


def check(found: Any, wanted: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=rtol, atol=atol)


@pytest.mark.parametrize("layer", LAYERS)
def test_value_and_gradients_are_jaxs(layer: str) -> None:
    check_layer(layer, ours.Local())


@pytest.mark.parametrize("layer", ["strided SAME, groups", "transposed NHWC"])
def test_value_and_gradients_of_a_server(remote: ours.Backend, layer: str) -> None:
    check_layer(layer, remote)


def check_layer(layer: str, backend: ours.Backend) -> None:
    arguments, *shapes = LAYERS[layer]
    x, weight = draw(0, *shapes)
    own = partial(ours.conv_general_dilated, **arguments, backend=backend)
    jaxs = partial(lax.conv_general_dilated, **arguments)
    check(own(x, weight), jaxs(x, weight))
    check(jax.jit(gradients(own))(x, weight), jax.jit(gradients(jaxs))(x, weight))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2), ("float16", 4e-3)]
)
def test_dtypes(remote: ours.Backend, dtype: str, tolerance: float) -> None:
    arguments, *shapes = LAYERS["strided SAME, groups"]
    x, weight = draw(1, *shapes, dtype=dtype)
    own = partial(ours.conv_general_dilated, **arguments, backend=remote)
    jaxs = partial(lax.conv_general_dilated, **arguments)
    assert own(x, weight).dtype == dtype
    found = gradients(own)(x, weight)
    assert all(each.dtype == dtype for each in found)
    exact = gradients(jaxs)(x.astype("float64"), weight.astype("float64"))
    for a, b in zip(found, exact, strict=True):
        np.testing.assert_allclose(np.float64(a), b, rtol=tolerance, atol=tolerance * 4)


@pytest.mark.parametrize("layer", ["strided SAME, groups", "transposed NHWC"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 2)])
def test_vmap(layer: str, axes: tuple[int | None, int | None]) -> None:
    """Per-example gradients and ensembles of models."""
    arguments, *shapes = LAYERS[layer]
    stacked = [
        shape if axis is None else (*shape[:axis], 3, *shape[axis:])
        for shape, axis in zip(shapes, axes, strict=True)
    ]
    x, weight = draw(2, *stacked)
    own, jaxs = (
        jax.jit(jax.vmap(gradients(partial(conv, **arguments)), axes))
        for conv in (ours.conv_general_dilated, lax.conv_general_dilated)
    )
    check(own(x, weight), jaxs(x, weight))


def test_nested_vmap_is_one_call() -> None:
    counted: list[tuple[str, tuple[int, ...]]] = []

    class Counting(ours.Local):
        def compute(self, operation: str, inputs: Any, *rest: Any) -> Any:
            counted.append((operation, next(iter(inputs.values())).shape))
            return super().compute(operation, inputs, *rest)

    x, weight = draw(3, (2, 5, 1, 4, 6, 6), (5, 3, 4, 3, 3))
    own, jaxs = (
        jax.jit(
            jax.vmap(
                jax.vmap(partial(conv, **more, window_strides=(1, 1), padding="SAME")), (0, None)
            )
        )
        for conv, more in (
            (ours.conv_general_dilated, {"backend": Counting()}),
            (lax.conv_general_dilated, {}),
        )
    )
    check(own(x, weight), jaxs(x, weight))
    # Mapped weights are groups, and images that they share are a batch.
    assert counted == [("conv_fwd", (2, 20, 6, 6))]


def test_only_the_gradients_asked_for_are_computed() -> None:
    counted: list[str] = []

    class Counting(ours.Local):
        def compute(self, operation: str, *rest: Any) -> Any:
            counted.append(operation)
            return super().compute(operation, *rest)

    x, weight = draw(4, (1, 2, 5, 5), (3, 2, 3, 3))
    conv = partial(
        ours.conv_general_dilated, window_strides=(1, 1), padding="SAME", backend=Counting()
    )
    for argnums, operation in (
        (0, "conv_bwd_data"),
        (1, "grouped_conv_bwd_weight"),
        ((0, 1), "conv_backward"),
    ):
        counted.clear()
        jax.grad(lambda x, w: jnp.sum(jnp.sin(conv(x, w))), argnums=argnums)(x, weight)
        assert counted == ["conv_fwd", operation]


def test_third_derivatives() -> None:
    arguments, *shapes = LAYERS["strided SAME, groups"]
    x, weight = draw(5, *shapes)

    def third(conv: Callable[..., jax.Array]) -> Any:
        def again(inner: Any) -> Any:
            return jax.grad(
                lambda x, w: sum(jnp.sum(jnp.cos(each)) for each in inner(x, w)), argnums=(0, 1)
            )

        return jax.jit(again(again(gradients(partial(conv, **arguments)))))(x, weight)

    check(third(ours.conv_general_dilated), third(lax.conv_general_dilated), rtol=1e-7)


def test_scan_and_checkpoint() -> None:
    x, weights = draw(6, (2, 4, 6, 6), (3, 4, 4, 3, 3))

    def loss(conv: Any, weights: jax.Array) -> jax.Array:
        @jax.checkpoint
        def step(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(conv(x, weight, (1, 1), "SAME")), None

        return jnp.sum(lax.scan(step, x, weights)[0])

    found, wanted = (
        jax.jit(jax.grad(partial(loss, conv)))(weights)
        for conv in (ours.conv_general_dilated, lax.conv_general_dilated)
    )
    check(found, wanted)


def test_equal_convolutions_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    x, weight = draw(7, (1, 2, 7, 7), (3, 2, 3, 3))
    conv = partial(ours.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    conv(x, weight)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        conv(x, weight)
    assert "Compiling" not in caplog.text


def test_empty_arrays_need_no_backend() -> None:
    x, weight = jnp.zeros((0, 2, 5, 5)), jnp.zeros((3, 2, 3, 3))
    found = gradients(partial(ours.conv_general_dilated, window_strides=(1, 1), padding="SAME"))
    grad_x, grad_weight = found(x, weight)
    assert grad_x.shape == x.shape
    assert not grad_weight.any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out_sharding": "x"}, "out_sharding is x; expected None"),
        ({"lhs": jnp.zeros((1, 2, 5, 5), jnp.int32)}, "dtype is int32; expected one of bfloat16"),
        ({"lhs": jnp.zeros((1, 2))}, "lhs has 2 dimensions"),
        ({"lhs": jnp.zeros((1, 3, 5, 5))}, "feature"),
        ({"rhs": jnp.zeros((3, 2, 3, 3), jnp.float32)}, "same dtype"),
    ],
)
def test_what_cannot_be_computed_is_said_at_once(changed: dict[str, Any], message: str) -> None:
    arguments = {
        "lhs": jnp.zeros((1, 2, 5, 5)),
        "rhs": jnp.zeros((3, 2, 3, 3)),
        "window_strides": (1, 1),
        "padding": "SAME",
        **changed,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        ours.conv_general_dilated(**arguments)


def test_a_server_that_is_gone_is_an_error() -> None:
    gone = ours.Remote("http://127.0.0.1:9")
    x, weight = draw(8, (1, 2, 5, 5), (3, 2, 3, 3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="convgrad serve"):
        ours.conv_general_dilated(x, weight, (1, 1), "SAME", backend=gone).block_until_ready()
    gone.close()


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, "highest"),
        ("highest", "highest"),
        (lax.Precision.DEFAULT, "high"),
        ("tensorfloat32", "high"),
        ((lax.Precision.HIGH, lax.Precision.HIGHEST), "highest"),
        (lax.DotAlgorithmPreset.F32_F32_F32, "highest"),
        ("TF32_TF32_F32", "high"),
    ],
)
def test_precision(precision: Any, expected: str) -> None:
    asked: list[str] = []

    class Recording(ours.Local):
        def compute(self, operation: str, inputs: Any, parameters: Any, outputs: Any) -> Any:
            asked.append(parameters["precision"])
            return super().compute(operation, inputs, parameters, outputs)

    x, weight = draw(9, (1, 2, 5, 5), (3, 2, 3, 3), dtype=jnp.float32)
    ours.conv_general_dilated(x, weight, (1, 1), "SAME", precision=precision, backend=Recording())
    assert asked == [expected]


@pytest.mark.parametrize(
    ("dtype", "preferred"),
    [
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("float32", "float64"),
    ],
)
def test_a_preferred_dtype_is_the_results(dtype: str, preferred: str) -> None:
    """bfloat16 operands with a float32 result, as flax.nnx asks for, lose no bits of the sums."""
    arguments, *shapes = LAYERS["strided SAME, groups"]
    x, weight = draw(1, *shapes, dtype=dtype)
    found = ours.conv_general_dilated(x, weight, **arguments, preferred_element_type=preferred)
    assert found.dtype == preferred
    exact = lax.conv_general_dilated(x.astype("float64"), weight.astype("float64"), **arguments)
    tolerance = {"float32": 1e-6, "float64": 1e-14}[preferred]
    np.testing.assert_allclose(np.float64(found), exact, rtol=tolerance, atol=10 * tolerance)

    def loss(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = ours.conv_general_dilated(x, weight, **arguments, preferred_element_type=preferred)
        return y.astype("float64").sum()

    assert {each.dtype for each in jax.grad(loss, (0, 1))(x, weight)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("backend", ["local", ours.Local])
def test_what_is_no_backend_is_refused(backend: Any) -> None:
    x = jnp.ones((1, 4, 4, 1))
    with pytest.raises(TypeError, match=r"such as Local\(\)"):
        ours.max_pool(x, (2, 2), backend=backend)
