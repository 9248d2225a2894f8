"""Training a small network in JAX whose convolutions and pooling a server computes."""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import convgrad.jax

remote = convgrad.jax.Remote(os.environ.get("CONVGRAD_URL", "http://127.0.0.1:8000"))


def loss(weights, images, labels, conv, pool):
    first, second, linear = weights
    x = jax.nn.relu(conv(images, first, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    x = pool(x, (2, 2), (2, 2))
    x = jax.nn.relu(conv(x, second, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    scores = x.mean((1, 2)) @ linear
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1))


def jax_pool(x, window, strides):
    window, strides = (1, *window, 1), (1, *strides, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "VALID")


# Are there stripes along the rows or along the columns?
keys = jax.random.split(jax.random.key(0), 5)
labels = jnp.arange(64) % 2
stripes = jnp.sign(jax.random.normal(keys[0], (64, 16, 1, 1))) * jnp.ones((1, 1, 16, 1))
images = jnp.where(labels[:, None, None, None] == 0, stripes, stripes.swapaxes(1, 2))
images += 0.3 * jax.random.normal(keys[1], images.shape)
weights = [
    0.3 * jax.random.normal(keys[2], (3, 3, 1, 8)),
    0.1 * jax.random.normal(keys[3], (3, 3, 8, 16)),
    0.3 * jax.random.normal(keys[4], (16, 2)),
]

ours = {
    "conv": partial(convgrad.jax.conv_general_dilated, backend=remote),
    "pool": partial(convgrad.jax.max_pool, backend=remote),
}
jaxs = {"conv": jax.lax.conv_general_dilated, "pool": jax_pool}
step = jax.jit(jax.value_and_grad(partial(loss, **ours)))
peer = jax.jit(jax.grad(partial(loss, **jaxs)))

pairs = zip(step(weights, images, labels)[1], peer(weights, images, labels), strict=True)
print("as JAX's own:", all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs))

losses = []
for _ in range(25):
    value, gradients = step(weights, images, labels)
    weights = [w - 0.5 * g for w, g in zip(weights, gradients, strict=True)]
    losses.append(float(value))
remote.close()
print(f"the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}")
