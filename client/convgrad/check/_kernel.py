"""A kernel of the caller's, run on drawn tensors as often as all checks need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad import layers
from convgrad.check._verify import bounded
from convgrad.check.philox import draw, spread_indices
from convgrad.contract.operations import OPERATIONS
from convgrad.contract.verification import Verification
from convgrad.errors import MalformedRequest

__all__ = ["KernelCheck", "Verifier", "kernel"]

Array = NDArray[Any]
Verifier = Callable[..., Verification]
"""Takes what `Client.verify` does."""

# Sums of integers are exact and show a missing term; normal numbers show how sums are rounded.
_GATES = ("integers", "normal")
# Operations whose outputs double with their first tensor, unless something is added to them.
_HOMOGENEOUS = frozenset(OPERATIONS) - {
    "conv_double_backward",
    "conv_transpose_double_backward",
    "grouped_conv_conv_fwd",
    "adaptive_max_pool_fwd",
    "maxpool1d_fwd",
    "maxpool2d_fwd",
    "maxpool3d_fwd",
}
_DOUBLED_OUTPUTS = frozenset({"output", "grad_input", "grad_weight", "grad_bias"})


@dataclass(frozen=True)
class KernelCheck:
    """What was found of a kernel: a verification for each gate."""

    operation: str
    layer: str
    gates: Mapping[str, Verification]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return all(found.passed for found in self.gates.values())

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is wrong, a sentence each, with the inputs that showed it."""
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
    """Run a kernel and verify it: on small integers, to the bit, and on normal numbers, within the
    bound; twice, for determinism; and with a tensor doubled, for linearity.

    Parameters
    ----------
    run
        Called with the operation's tensors and parameters by name, as the methods of
        `convgrad.Client` are; returns the output, or all of them in the operation's order, or by
        name.
    operation
        Its name, such as ``conv_bwd_data``.
    layer
        In anybody's words, see `convgrad.layers.parse`.
    dtype, layout, batch
        In place of the layer's own.
    seed
        What tensors are drawn from.
    factors, sums
        How the kernel computes, see `bounded`.
    verify
        `Client.verify` of a server that is to judge; by default this process does.

    Raises
    ------
    MalformedRequest
        The layer cannot be read, or the operation does not take it.

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
            plane = math.prod(stated.input_size)  # of the pooling, which is the unpooling's output
            tensors["indices"] = spread_indices(shapes["indices"], plane, layout or stated.layout)
        result = _outputs(run, operation, tensors, parameters)
        more: dict[str, Any] = {"second": _outputs(run, operation, tensors, parameters)}
        if operation in _HOMOGENEOUS and "bias" not in tensors:
            more["doubled"] = _doubled(run, operation, tensors, parameters)
        if factors is not None:
            more["factors"] = factors
        if verify is None:
            gates[gate] = bounded(operation, result, sums=sums, **more, **tensors, **parameters)
            continue
        # The server draws the same: nothing but the results is sent.
        fields = {"shapes": dict(shapes), "dtype": kind, "seed": seed, "distribution": gate}
        gates[gate] = verify(operation, result, sums=sums, **more, **fields, **parameters)
    return KernelCheck(operation, layers.text(stated), gates)


def _outputs(
    run: Callable[..., Any],
    operation: str,
    tensors: Mapping[str, Array],
    parameters: Mapping[str, Any],
) -> dict[str, Array]:
    """What a kernel returns, by name; it gets copies, which it may overwrite."""
    found = run(**{name: array.copy() for name, array in tensors.items()}, **parameters)
    names: Sequence[str] = parameters.get("outputs") or OPERATIONS[operation].outputs
    if isinstance(found, Mapping):
        named = dict(found)
    elif isinstance(found, tuple | list):
        named = dict(zip(names, found, strict=False))
    else:
        named = {names[0]: found}
    return {name: np.array(array) for name, array in named.items() if array is not None}


def _doubled(
    run: Callable[..., Any],
    operation: str,
    tensors: Mapping[str, Array],
    parameters: Mapping[str, Any],
) -> dict[str, Array]:
    first = next(name for name in OPERATIONS[operation].tensors if name in tensors)
    array = tensors[first]
    twice = {**tensors, first: (array + array).astype(array.dtype)}
    found = _outputs(run, operation, twice, parameters)
    # Of all gradients from one call, one does not depend on that tensor.
    return {name: each for name, each in found.items() if name in _DOUBLED_OUTPUTS}
