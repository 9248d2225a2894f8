"""A small convolutional network whose convolutions and poolings run on a convgrad server.

::

    image 1x8x8 → conv 3x3, 16 → ReLU → conv 3x3, 32 → max pool 2 → ReLU
                → conv 3x3, 64 → max pool 2 → ReLU → conv 2x2, 10 → logits

The forward pass takes six requests and the backward pass six more. ReLU and the loss are computed
here with NumPy. Tensors that only the next request needs stay on the server: the large image
between a convolution and its pooling, the pooling's indices, and the gradient between them. (ReLU
and max pooling commute, so ReLU may follow the pooling.)
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgrad import Client, ConvgradError, Stored
from convgrad.demo.data import CLASSES

__all__ = ["Network", "cross_entropy"]

Array = NDArray[np.float32]


T = TypeVar("T")


class Layer(Protocol):
    """A layer of the network; ``forward`` saves what ``backward`` needs."""

    def forward(self, input: Array) -> Array: ...

    def backward(self, grad_output: Array) -> Array: ...


class Server:
    """The client and the names of its stored tensors, which are unique to this program."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._prefix = f"demo-{secrets.token_hex(4)}"
        self._names: set[str] = set()

    def keeping(self, layer: int, *outputs: str) -> Client:
        """Return a client whose requests store these outputs of a layer on the server."""
        store = {output: f"{self._prefix}.{layer}.{output}" for output in outputs}
        self._names.update(store.values())
        return self.client.with_options(store=store)

    def forget(self) -> None:
        """Delete the stored tensors; those that cannot be deleted expire."""
        for name in self._names:
            with contextlib.suppress(ConvgradError):
                self.client.drop(name)
        self._names.clear()


@dataclass(slots=True, eq=False)
class Convolution:
    """A convolution with a bias; the server computes the output and all three gradients."""

    client: Client
    weight: Array
    bias: Array
    padding: int
    grad_weight: Array = field(init=False)
    grad_bias: Array = field(init=False)
    input: Array = field(init=False)

    def forward(self, input: Array) -> Array:
        self.input = input
        return self.client.conv_fwd(input, self.weight, self.bias, padding=self.padding)

    def backward(self, grad_output: Array) -> Array:
        grad_input, grad_weight, grad_bias = self.client.conv_backward(
            grad_output, self.input, self.weight, padding=self.padding
        )
        self.grad_weight, self.grad_bias = _given(grad_weight), _given(grad_bias)
        return _given(grad_input)


@dataclass(slots=True, eq=False)
class PooledConvolution:
    """A convolution followed by max pooling; the tensors between them stay on the server."""

    server: Server
    number: int
    convolution: Convolution
    kernel_size: int
    _indices: Stored = field(init=False)
    _convolved: Stored = field(init=False)

    def forward(self, input: Array) -> Array:
        convolution = self.convolution
        convolution.input = input
        self._convolved = _stored(
            self.server.keeping(self.number, "output").conv_fwd(
                input, convolution.weight, convolution.bias, padding=convolution.padding
            )
        )
        output, indices = self.server.keeping(self.number, "indices").maxpool2d_fwd(
            self._convolved, self.kernel_size, return_indices=True, index_dtype="int32"
        )
        self._indices = _stored(indices)
        return output

    def backward(self, grad_output: Array) -> Array:
        grad_convolved = self.server.keeping(self.number, "grad_input").maxpool2d_bwd(
            grad_output,
            indices=self._indices,
            input_size=self._convolved.shape,
            kernel_size=self.kernel_size,
        )
        return self.convolution.backward(grad_convolved)


@dataclass(slots=True, eq=False)
class ReLU:
    """max(x, 0), in NumPy."""

    _positive: NDArray[np.bool_] = field(init=False)

    def forward(self, input: Array) -> Array:
        self._positive = input > 0
        return input * self._positive

    def backward(self, grad_output: Array) -> Array:
        return grad_output * self._positive


class Network:
    """The layers in order, and their parameters."""

    def __init__(self, client: Client, rng: np.random.Generator) -> None:
        def convolution(inputs: int, outputs: int, kernel: int, padding: int) -> Convolution:
            # He initialization preserves the variance through ReLU layers.
            scale = np.sqrt(2.0 / (inputs * kernel * kernel))
            weight = rng.normal(scale=scale, size=(outputs, inputs, kernel, kernel))
            bias = np.zeros(outputs, dtype=np.float32)
            return Convolution(client, weight.astype(np.float32), bias, padding)

        self.convolutions = [
            convolution(1, 16, kernel=3, padding=1),
            convolution(16, 32, kernel=3, padding=1),
            convolution(32, 64, kernel=3, padding=1),
            convolution(64, CLASSES, kernel=2, padding=0),
        ]
        first, second, third, classifier = self.convolutions
        self._server = server = Server(client)
        self.layers: list[Layer] = [
            *(first, ReLU()),
            *(PooledConvolution(server, 2, second, kernel_size=2), ReLU()),
            *(PooledConvolution(server, 3, third, kernel_size=2), ReLU()),
            classifier,
        ]

    def forward(self, images: Array) -> Array:
        """Images (N, 1, 8, 8) → logits (N, 10)."""
        activation = images
        for layer in self.layers:
            activation = layer.forward(activation)
        return activation.reshape(len(images), CLASSES)

    def backward(self, grad_logits: Array) -> Array:
        """∂loss/∂logits (N, 10) → ∂loss/∂images; layers keep the gradients of their parameters."""
        gradient = grad_logits.reshape(*grad_logits.shape, 1, 1)
        for layer in reversed(self.layers):
            gradient = layer.backward(gradient)
        return gradient

    def forget(self) -> None:
        """Delete all tensors stored on the server."""
        self._server.forget()

    def parameters(self) -> list[Array]:
        return [tensor for layer in self.convolutions for tensor in (layer.weight, layer.bias)]

    def gradients(self) -> list[Array]:
        return [
            tensor for layer in self.convolutions for tensor in (layer.grad_weight, layer.grad_bias)
        ]


def cross_entropy(logits: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return the softmax cross-entropy of each image (N,), and ∂(their mean)/∂logits (N, 10)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    gradient = np.exp(log_probability)
    gradient[rows, labels] -= 1
    return -log_probability[rows, labels], gradient / len(labels)


def _given(output: T | None) -> T:
    """Narrow the type of a requested output, which the SDK types as optional."""
    if output is None:
        raise TypeError("the answer lacks an output that the request asked for")
    return output


def _stored(output: object) -> Stored:
    """Narrow the type of a stored output, which the SDK types as an array."""
    if not isinstance(output, Stored):
        raise TypeError(f"the answer holds {type(output).__name__}, not a tensor that was kept")
    return output
