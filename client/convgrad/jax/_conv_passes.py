"""A convolution's passes, each with derivatives made of the others.

Each pass is linear in each of its two tensors, and its derivatives are the other two passes. So
derivatives of every order are passes again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
from jax.custom_derivatives import SymbolicZero

from convgrad.jax._backends import Backend
from convgrad.jax._operation import Operation, Role

__all__ = ["Convolution", "forward", "gradient_of_input", "gradient_of_weight"]

Array: TypeAlias = jax.Array
Shape = tuple[int, ...]
_GEOMETRY = ("stride", "padding", "dilation", "groups", "precision", "layout")
_ROLES: dict[str, Role] = {"weight": "weight", "grad_weight": "weight"}


@dataclass(frozen=True, slots=True)
class Convolution:
    """What is static in a convolution; the shapes are those without ``vmap``'s dimensions."""

    backend: Backend
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    precision: str
    layout: str
    input_shape: Shape
    weight_shape: Shape
    output_shape: Shape

    @property
    def channels_last(self) -> bool:
        return self.layout.endswith("C")

    def compute(
        self, name: str, inputs: dict[str, Array], results: dict[str, Shape], **more: Any
    ) -> list[Array]:
        """Compute one operation of the contract on this convolution's tensors."""
        operation = Operation(
            self.backend,
            name,
            tuple((each, _ROLES.get(each, "activation")) for each in inputs),
            tuple((each, _ROLES.get(each, "activation"), results[each]) for each in results),
            (*((name, getattr(self, name)) for name in _GEOMETRY), *more.items()),
            self.channels_last,
        )
        return operation(*inputs.values())

    def spatial(self, shape: Shape) -> Shape:
        """The spatial dimensions of an input's or a weight's shape."""
        return shape[1:-1] if self.channels_last else shape[2:]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward(conv: Convolution, x: Array, weight: Array) -> Array:
    """Return the output."""
    inputs = {"input": x, "weight": weight}
    (output,) = conv.compute("conv_fwd", inputs, {"output": conv.output_shape})
    return output


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradient_of_input(conv: Convolution, grad_output: Array, weight: Array) -> Array:
    """Return the gradient of the input."""
    inputs = {"grad_output": grad_output, "weight": weight}
    results, size = {"grad_input": conv.input_shape}, conv.spatial(conv.input_shape)
    (grad,) = conv.compute("conv_bwd_data", inputs, results, input_size=size)
    return grad


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradient_of_weight(conv: Convolution, x: Array, grad_output: Array) -> Array:
    """Return the gradient of the weight."""
    inputs = {"input": x, "grad_output": grad_output}
    results, size = {"grad_weight": conv.weight_shape}, conv.spatial(conv.weight_shape)
    (grad,) = conv.compute("grouped_conv_bwd_weight", inputs, results, weight_size=size)
    return grad


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def both_gradients(
    conv: Convolution, grad_output: Array, x: Array, weight: Array
) -> tuple[Array, Array]:
    """Return the gradients of the input and of the weight, from one call."""
    inputs = {"grad_output": grad_output, "input": x, "weight": weight}
    results = {"grad_input": conv.input_shape, "grad_weight": conv.weight_shape}
    grad_input, grad_weight = conv.compute("conv_backward", inputs, results, outputs=tuple(results))
    return grad_input, grad_weight


def _save(function: Any, conv: Convolution, first: Any, second: Any) -> tuple[Array, Any]:
    """Keep each tensor only where the other's derivative is wanted, which takes it."""
    saved = (
        first.value if second.perturbed else None,
        second.value if first.perturbed else None,
    )
    return function(conv, first.value, second.value), saved


def _forward_vjp(conv: Convolution, saved: Any, g: Any) -> tuple[Array | None, Array | None]:
    x, weight = saved
    if isinstance(g, SymbolicZero):
        return None, None
    if x is not None and weight is not None:
        grad_x, grad_weight = both_gradients(conv, g, x, weight)
        return grad_x, grad_weight
    return (
        None if weight is None else gradient_of_input(conv, g, weight),
        None if x is None else gradient_of_weight(conv, x, g),
    )


def _gradient_of_input_vjp(
    conv: Convolution, saved: Any, g: Any
) -> tuple[Array | None, Array | None]:
    grad_output, weight = saved
    if isinstance(g, SymbolicZero):
        return None, None
    return (
        None if weight is None else forward(conv, g, weight),
        None if grad_output is None else gradient_of_weight(conv, g, grad_output),
    )


def _gradient_of_weight_vjp(
    conv: Convolution, saved: Any, g: Any
) -> tuple[Array | None, Array | None]:
    x, grad_output = saved
    if isinstance(g, SymbolicZero):
        return None, None
    return (
        None if grad_output is None else gradient_of_input(conv, grad_output, g),
        None if x is None else forward(conv, x, g),
    )


def _save_for_both(conv: Convolution, grad_output: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    saved = (
        grad_output.value if x.perturbed else None,
        grad_output.value if weight.perturbed else None,
        (x.value, weight.value) if grad_output.perturbed else None,
    )
    return both_gradients(conv, grad_output.value, x.value, weight.value), saved


def _both_gradients_vjp(
    conv: Convolution, saved: Any, g: tuple[Any, Any]
) -> tuple[Array | None, Array | None, Array | None]:
    for_x, for_weight, tensors = saved
    g_input, g_weight = (None if isinstance(each, SymbolicZero) else each for each in g)
    terms = []
    if tensors is not None and g_input is not None:
        terms.append(forward(conv, g_input, tensors[1]))
    if tensors is not None and g_weight is not None:
        terms.append(forward(conv, tensors[0], g_weight))
    return (
        sum(terms[1:], start=terms[0]) if terms else None,
        None if for_x is None or g_weight is None else gradient_of_input(conv, for_x, g_weight),
        None
        if for_weight is None or g_input is None
        else gradient_of_weight(conv, g_input, for_weight),
    )


for _function, _vjp in (
    (forward, _forward_vjp),
    (gradient_of_input, _gradient_of_input_vjp),
    (gradient_of_weight, _gradient_of_weight_vjp),
):
    _function.defvjp(partial(_save, _function), _vjp, symbolic_zeros=True)
both_gradients.defvjp(_save_for_both, _both_gradients_vjp, symbolic_zeros=True)
