"""One operation of the contract as a callback from JAX, in a single call under ``vmap`` too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from convgrad.jax._backends import Backend

__all__ = ["Operation", "Role"]

Array = NDArray[Any]
Shape = tuple[int, ...]
Role = Literal["activation", "weight"]


@dataclass(frozen=True, slots=True)
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
        dtype = inputs[0].dtype
        results = [jax.ShapeDtypeStruct(shape, dtype) for _, _, shape in self.outputs]
        # vmap prepends its dimensions, of size 1 where an array is not mapped.
        found: list[jax.Array] = jax.pure_callback(
            _Callback(self), results, *inputs, vmap_method="expand_dims"
        )
        return found


@dataclass(frozen=True, slots=True)
class _Callback:
    operation: Operation

    def __call__(self, *inputs: Any) -> list[Array]:
        operation = self.operation
        arrays = [np.asarray(each) for each in inputs]
        mapped = arrays[0].ndim - len(operation.outputs[0][2])
        sizes = np.broadcast_shapes(*(array.shape[:mapped] for array in arrays))
        count = math.prod(sizes)
        roles = [role for _, role in operation.inputs]
        one_weight = all(
            math.prod(array.shape[:mapped]) == 1
            for array, role in zip(arrays, roles, strict=True)
            if role == "weight"
        )
        if one_weight and all(role == "activation" for _, role, _ in operation.outputs):
            found = self._as_images(arrays, mapped, sizes)
        else:
            found = self._as_groups(arrays, mapped, sizes, count)
        return [
            array.reshape((*sizes, *shape))
            for array, (_, _, shape) in zip(found, operation.outputs, strict=True)
        ]

    def _as_images(self, arrays: Sequence[Array], mapped: int, sizes: Shape) -> list[Array]:
        """Compute with the mapped dimensions folded into the batch."""
        given = []
        for array, (_, role) in zip(arrays, self.operation.inputs, strict=True):
            rest = array.shape[mapped:]
            if role == "activation":
                array, rest = np.broadcast_to(array, (*sizes, *rest)), (-1, *rest[1:])
            given.append(array.reshape(rest))
        return self._compute(given, dict(self.operation.parameters))

    def _as_groups(
        self, arrays: Sequence[Array], mapped: int, sizes: Shape, count: int
    ) -> list[Array]:
        """Compute with the mapped dimensions folded into the groups of channels.

        This is for weights that differ, and for their gradients, which must not be summed.
        """
        operation = self.operation
        given = []
        for array, (_, role) in zip(arrays, operation.inputs, strict=True):
            rest = array.shape[mapped:]
            axis = self._channel_axis(role, len(rest))
            each = np.broadcast_to(array, (*sizes, *rest)).reshape((count, *rest))
            merged = (*rest[:axis], count * rest[axis], *rest[axis + 1 :])
            given.append(np.moveaxis(each, 0, axis).reshape(merged))
        parameters = dict(operation.parameters)
        parameters["groups"] *= count
        found = []
        for array, (_, role, shape) in zip(
            self._compute(given, parameters), operation.outputs, strict=True
        ):
            axis = self._channel_axis(role, len(shape))
            found.append(np.moveaxis(array.reshape((*shape[:axis], count, *shape[axis:])), axis, 0))
        return found

    def _channel_axis(self, role: Role, rank: int) -> int:
        if role == "weight":
            return 0
        return rank - 1 if self.operation.channels_last else 1

    def _compute(self, arrays: list[Array], parameters: dict[str, Any]) -> list[Array]:
        operation = self.operation
        names = [name for name, _ in operation.inputs]
        return operation.backend.compute(
            operation.name,
            dict(zip(names, arrays, strict=True)),
            parameters,
            [name for name, _, _ in operation.outputs],
        )
