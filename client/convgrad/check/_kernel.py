"""Runs and verifies a caller's kernel on generated tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad import layers
from convgrad.check._verify import bounded
from convgrad.check.linearity import linear_pair
from convgrad.check.philox import draw, spread_indices
from convgrad.contract.judged_results import linear_operands
from convgrad.contract.operations import OPERATIONS
from convgrad.contract.verification import Verification
from convgrad.errors import MalformedRequest

__all__ = ["KernelCheck", "Verifier", "kernel"]

Array = NDArray[Any]
Verifier = Callable[..., Verification]
"""A function with the parameters of `Client.verify`."""

# Sums of integers are exact and reveal missing terms; normal numbers reveal rounding.
_GATES = ("integers", "normal")


@dataclass(frozen=True)
class KernelCheck:
    """The result of checking a kernel: one verification per kind of input."""

    operation: str
    layer: str
    gates: Mapping[str, Verification]

    @property
    def passed(self) -> bool:
        """Whether all verifications passed."""
        return all(found.passed for found in self.gates.values())

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence per fault, with the kind of input that revealed it."""
        return tuple(
            f"{gate} inputs: {finding.sentence}"
            for gate, found in self.gates.items()
            for finding in found.findings
        )


def kernel(
    run: Callable[..., Any],
    operation: str,
    layer: str | layers.Layer,
    *,
    dtype: str | None = None,
    layout: str | None = None,
    batch: int | None = None,
    seed: int = 0,
    factors: str | None = None,
    sums: str = "float32",
    verify: Verifier | None = None,
) -> KernelCheck:
    """Run a kernel on generated tensors and verify its results.

    Results on small integers must be exact, and results on normally distributed numbers within
    the error bound. A second run checks determinism. A run with the first tensor doubled and, on
    the normally distributed numbers, two more runs for each tensor check linearity.

    Parameters
    ----------
    run
        The kernel, called with the operation's tensors and parameters as keyword arguments, like
        the methods of `convgrad.Client`. It returns the output, a sequence of all outputs in the
        operation's order, or a mapping of outputs by name. ``stride``, ``dilation`` and sizes are
        lists with a value per dimension, ``padding`` is a list of [before, after] pairs.
    operation
        Name of the operation, such as ``conv_bwd_data``.
    layer
        The layer, in any notation that `convgrad.layers.parse` reads.
    dtype, layout, batch
        Override those of the layer.
    seed
        Seed of the generated tensors.
    factors, sums
        Arithmetic of the kernel, see `bounded`.
    verify
        `Client.verify` of a server that checks the results; by default this process checks them.

    Raises
    ------
    MalformedRequest
        The layer cannot be read, the operation does not apply to it, or the kernel returned no
        output.

    Examples
    --------
    >>> found = convgrad.check.kernel(my_kernel, "conv_bwd_data", "mb2ic64ih56oc64oh56kh3ph1")
    >>> assert found.passed, found.sentences
    """
    if operation not in OPERATIONS:
        raise MalformedRequest(
            f"there is no operation {operation[:64]!r}; expected one of {', '.join(OPERATIONS)}"
        )
    stated = layers.parse(layer) if isinstance(layer, str) else layer
    if batch is not None:
        stated = stated.with_batch(batch)
    shapes, parameters = layers.arguments(operation, stated, layout)
    kind = dtype or stated.dtype or "float32"
    gates = {}
    for gate in _GATES:
        tensors: dict[str, Any] = {
            name: draw(name, shape, kind, seed, gate)
            for name, shape in shapes.items()
            if name != "indices"
        }
        if "indices" in shapes:
            plane = math.prod(stated.input_size)  # the pooling's input is the unpooling's output
            tensors["indices"] = spread_indices(shapes["indices"], plane, layout or stated.layout)
        result = _outputs(run, operation, tensors, parameters)
        more: dict[str, Any] = {"second": _outputs(run, operation, tensors, parameters)}
        more |= _linear_results(run, operation, tensors, parameters, seed, pairs=gate == "normal")
        if factors is not None:
            more["factors"] = factors
        if verify is None:
            gates[gate] = bounded(operation, result, sums=sums, **more, **tensors, **parameters)
            continue
        # The server generates the same tensors, so only the results are sent.
        fields = {"shapes": dict(shapes), "dtype": kind, "seed": seed, "distribution": gate}
        gates[gate] = verify(operation, result, sums=sums, **more, **fields, **parameters)
    return KernelCheck(operation, layers.text(stated), gates)


def _outputs(
    run: Callable[..., Any],
    operation: str,
    tensors: Mapping[str, Array],
    parameters: Mapping[str, Any],
) -> dict[str, Array]:
    """Run a kernel on copies, which it may overwrite; return its outputs by name."""
    found = run(**{name: array.copy() for name, array in tensors.items()}, **parameters)
    names: Sequence[str] = parameters.get("outputs") or OPERATIONS[operation].outputs
    if isinstance(found, Mapping):
        named = dict(found)
    elif isinstance(found, tuple | list):
        named = dict(zip(names, found, strict=False))
    else:
        named = {names[0]: found}
    outputs = {name: np.array(array) for name, array in named.items() if array is not None}
    if not outputs:
        raise MalformedRequest(
            f"the kernel returned {found!r}; expected {names[0]} as an array, or a sequence or "
            f"mapping of {', '.join(names)}"
        )
    return outputs


def _linear_results(
    run: Callable[..., Any],
    operation: str,
    tensors: Mapping[str, Array],
    parameters: Mapping[str, Any],
    seed: int,
    *,
    pairs: bool,
) -> dict[str, Any]:
    """Run a kernel on changed tensors; return the arguments ``doubled`` and ``linear``."""
    known = OPERATIONS[operation]
    by_tensor: dict[str, list[str]] = {}
    for output in known.outputs:
        for tensor in linear_operands(operation, output, tensors):
            by_tensor.setdefault(tensor, []).append(output)

    def outputs(tensor: str, array: Array) -> dict[str, Array]:
        found = _outputs(run, operation, {**tensors, tensor: array}, parameters)
        return {name: each for name, each in found.items() if name in by_tensor[tensor]}

    first = next(name for name in known.tensors if name in tensors)
    more: dict[str, Any] = {}
    if first in by_tensor:
        array = tensors[first]
        more["doubled"] = outputs(first, (array + array).astype(array.dtype))
    if pairs:
        more["linear"] = {
            tensor: tuple(
                outputs(tensor, each) for each in linear_pair(tensor, tensors[tensor], seed)
            )
            for tensor in by_tensor
        }
    return more
