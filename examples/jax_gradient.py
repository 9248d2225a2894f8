"""A convolution in JAX whose gradients a server computes; it may stand inside of jit and grad."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from convgrad import Client

client = Client(os.environ.get("CONVGRAD_URL", "http://127.0.0.1:8000"))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def conv2d(x, weight, stride=1, padding=0):
    """Convolution of x [N, C, H, W] with weight [K, C, R, S]."""
    edges = [(padding, padding)] * 2
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), edges)


def _forward(x, weight, stride, padding):
    return conv2d(x, weight, stride, padding), (x, weight)


def _backward(stride, padding, saved, grad_output):
    def ask(grad_output, x, weight):
        arrays = map(np.asarray, (grad_output, x, weight))
        grads = client.conv_backward(
            *arrays, stride=stride, padding=padding, outputs=("grad_input", "grad_weight")
        )
        return grads.grad_input, grads.grad_weight

    x, weight = saved
    results = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(weight.shape, weight.dtype),
    )
    # The gradient is a pure function of its inputs, so JAX may reorder or repeat the call.
    return jax.pure_callback(ask, results, grad_output, x, weight)


conv2d.defvjp(_forward, _backward)


def loss(x, weight, convolution):
    return jnp.sum(jnp.tanh(convolution(x, weight, 2, 1)))


def plain(x, weight, stride, padding):
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), [(padding, padding)] * 2)


keys = jax.random.split(jax.random.key(0))
x = jax.random.normal(keys[0], (2, 3, 17, 17))
weight = jax.random.normal(keys[1], (4, 3, 3, 3))
gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
ours, jaxs = gradient(x, weight, conv2d), gradient(x, weight, plain)
print("shapes", *(array.shape for array in ours))
print("as JAX's own:", all(np.allclose(a, b, atol=1e-4) for a, b in zip(ours, jaxs, strict=True)))
client.close()
