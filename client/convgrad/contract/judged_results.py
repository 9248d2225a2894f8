"""The fields of a verification request that hold results of the caller's kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from convgrad.contract.operations import OPERATIONS

__all__ = ["JudgedResult", "judged_results", "linear_operands"]


class JudgedResult(NamedTuple):
    """One field: a result for ``output``, computed from the tensors that ``role`` describes.

    ``tensor`` is the operand that was replaced, for the roles ``addend`` and ``sum``.
    """

    name: str
    role: str
    output: str
    description: str
    tensor: str | None = None


_CONV = {"output": ("input", "weight")}
_GRADIENTS = {
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
    "grad_bias": ("grad_output",),
}
# The first sums two convolutions, so it is linear in none of their operands alone.
_SECOND_GRADIENTS = {
    "grad_grad_output": (),
    "grad_input": ("grad_output", "grad_grad_weight"),
    "grad_weight": ("grad_output", "grad_grad_input"),
}
# Other operations are linear in `input` forward and in `grad_output` backward.
_LINEAR: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "conv_fwd": _CONV,
    "conv_transpose_fwd": _CONV,
    "conv3d_transpose": _CONV,
    "conv_bwd_data": _GRADIENTS,
    "conv3d_backprop_input": _GRADIENTS,
    "grouped_conv_bwd_weight": _GRADIENTS,
    "conv_backward": _GRADIENTS,
    "conv_transpose_backward": _GRADIENTS,
    "conv_double_backward": _SECOND_GRADIENTS,
    "conv_transpose_double_backward": _SECOND_GRADIENTS,
    "grouped_conv_conv_fwd": {},
    "adaptive_max_pool_fwd": {},
    **{f"maxpool{ndim}d_fwd": {} for ndim in (1, 2, 3)},
}
_DEFAULT = {"output": ("input",), "grad_input": ("grad_output",)}
# Addends of the result: with one of them an output is no longer linear in the other tensors.
_ADDENDS = ("bias", "accumulate")


def linear_operands(operation: str, output: str, tensors: Collection[str]) -> tuple[str, ...]:
    """Return the tensors in each of which an output is linear.

    Parameters
    ----------
    operation, output
        Names of the operation and of the output.
    tensors
        Names of the tensors in the request; with a bias or an addend no output is linear.
    """
    if any(name in tensors for name in _ADDENDS):
        return ()
    found = _LINEAR.get(operation, _DEFAULT).get(output, ())
    return tuple(name for name in found if name in tensors)


@cache
def judged_results(operation: str) -> tuple[JudgedResult, ...]:
    """Return the fields of ``POST /verify/<operation>`` that hold results."""
    return tuple(_fields(operation))


def _fields(operation: str) -> Iterator[JudgedResult]:
    known = OPERATIONS[operation]
    for role, description in (
        ("result", "The caller's {}, to be verified."),
        ("second", "The caller's {} from a second run; all bits must be equal."),
        ("doubled", "The caller's {} with the operation's first tensor doubled; it must double."),
    ):
        for output in known.outputs:
            yield JudgedResult(f"{role}_{output}", role, output, description.format(output))
    operands = [name for name in known.tensors if name not in _ADDENDS]
    for output in known.outputs:
        for tensor in linear_operands(operation, output, operands):
            for role, description in (
                ("addend", f"The caller's {output} with {tensor} replaced by y (linearity)."),
                ("sum", f"The caller's {output} with {tensor} replaced by {tensor} + y."),
            ):
                name = f"{role}_{tensor}_{output}"
                yield JudgedResult(name, role, output, description, tensor)
