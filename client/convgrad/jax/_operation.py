"""One operation of the contract as a primitive of JAX, in a single call under ``vmap`` too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import batching, mlir

from convgrad.jax._backends import Backend, Local
from convgrad.jax._native import PLATFORMS, native

__all__ = ["Operation", "Role"]

Shape = tuple[int, ...]
Role = Literal["activation", "weight"]
Arrays = Sequence[jax.Array]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Operation:
    """An operation on arrays of known shapes; hashable, so that JAX compiles equal ones once.

    An activation is (N, C, *spatial) or (N, *spatial, C); a weight has its output channels first.

    Attributes
    ----------
    inputs : tuple of (name, role)
        The operation's tensors, by the contract's names.
    outputs : tuple of (name, role, shape)
        Its results.
    parameters : tuple of (name, value)
        The other fields of a request.
    """

    backend: Backend
    name: str
    inputs: tuple[tuple[str, Role], ...]
    outputs: tuple[tuple[str, Role, Shape], ...]
    parameters: tuple[tuple[str, Any], ...]
    channels_last: bool

    def __call__(self, *inputs: jax.Array) -> list[jax.Array]:
        """Compute the operation on JAX's arrays, all of one dtype."""
        found: list[jax.Array] = _primitive.bind(*inputs, operation=self)
        return found

    def channel_axis(self, role: Role, rank: int) -> int:
        """The axis along which groups of channels follow one another."""
        if role == "weight":
            return 0
        return rank - 1 if self.channels_last else 1


def _results(*inputs: Any, operation: Operation) -> list[Any]:
    dtype = inputs[0].dtype
    return [jax.core.ShapedArray(shape, dtype) for _, _, shape in operation.outputs]


@partial(jax.jit, static_argnames="operation")
def _compiled(*inputs: jax.Array, operation: Operation) -> Arrays:
    return operation(*inputs)


def _eager(*inputs: jax.Array, operation: Operation) -> Arrays:
    with jax.disable_jit(False):
        found: Arrays = _compiled(*inputs, operation=operation)
    return found


def _batched(
    inputs: Arrays, axes: Sequence[int | None], *, operation: Operation
) -> tuple[Arrays, list[int]]:
    """Compute with a mapped dimension folded into the batch, or else into the groups of channels.

    Weights that differ, and their gradients, which must not be summed, make groups.
    """
    (count,) = {x.shape[axis] for x, axis in zip(inputs, axes, strict=True) if axis is not None}
    roles = [role for _, role in operation.inputs]
    one_weight = all(
        axis is None for axis, role in zip(axes, roles, strict=True) if role == "weight"
    )
    images = one_weight and all(role == "activation" for _, role, _ in operation.outputs)

    def place(role: Role, rank: int) -> int | None:
        """The axis of a tensor that the mapped dimension is folded into."""
        if images:
            return 0 if role == "activation" else None
        return operation.channel_axis(role, rank)

    given = []
    for x, axis, role in zip(inputs, axes, roles, strict=True):
        rank = x.ndim if axis is None else x.ndim - 1
        into = place(role, rank)
        if into is not None:
            stacked = jnp.expand_dims(x, into) if axis is None else jnp.moveaxis(x, axis, into)
            before, (_, size, *after) = stacked.shape[:into], stacked.shape[into:]
            stacked = jnp.broadcast_to(stacked, (*before, count, size, *after))
            x = stacked.reshape((*before, count * size, *after))
        given.append(x)

    outputs, found_axes = [], []
    for name, role, shape in operation.outputs:
        into = place(role, len(shape)) or 0
        merged = (*shape[:into], count * shape[into], *shape[into + 1 :])
        outputs.append((name, role, merged))
        found_axes.append(into)
    parameters = operation.parameters
    if not images:
        parameters = tuple(
            (name, value * count if name == "groups" else value) for name, value in parameters
        )
    folded = replace(operation, outputs=tuple(outputs), parameters=parameters)
    found = [
        y.reshape((*shape[:into], count, *shape[into:]))
        for y, (_, _, shape), into in zip(
            folded(*given), operation.outputs, found_axes, strict=True
        )
    ]
    return found, found_axes


def _computed(compute: Callable[..., Any], operation: Operation, *inputs: Any) -> Any:
    """Have a function compute it that takes what `Backend.compute` takes."""
    names = [name for name, _ in operation.inputs]
    return compute(
        operation.name,
        dict(zip(names, inputs, strict=True)),
        dict(operation.parameters),
        [name for name, _, _ in operation.outputs],
    )


def _by_callback(operation: Operation, *inputs: jax.Array) -> Arrays:
    """Call the backend on arrays in the host's memory."""

    def compute(*arrays: Any) -> Any:
        return _computed(operation.backend.compute, operation, *map(np.asarray, arrays))

    dtype = inputs[0].dtype
    results = [jax.ShapeDtypeStruct(shape, dtype) for _, _, shape in operation.outputs]
    found: Arrays = jax.pure_callback(compute, results, *inputs, vmap_method="sequential")
    return found


def _lowered(platform: str | None, context: Any, *inputs: Any, operation: Operation) -> Any:
    in_process = native(platform) if type(operation.backend) is Local else None
    run: Callable[..., Arrays] = partial(_by_callback, operation)
    if in_process is not None:
        run = partial(_computed, in_process.call, operation)
    return mlir.lower_fun(run, multiple_results=True)(context, *inputs)


_primitive = jax.extend.core.Primitive("convgrad")
_primitive.multiple_results = True
_primitive.def_abstract_eval(_results)
_primitive.def_impl(_eager)
batching.primitive_batchers[_primitive] = _batched
for _platform in (None, *PLATFORMS):
    mlir.register_lowering(_primitive, partial(_lowered, _platform), platform=_platform)
