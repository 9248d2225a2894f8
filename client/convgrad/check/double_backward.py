"""References of double backward passes: sums of convolutions of several pairs of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.adjoint import adjoint_side
from convgrad.check.bounds import Float, Reference
from convgrad.check.convolve import Convolver, wide
from convgrad.check.layouts import Seen
from convgrad.check.references import Conv, Parameters, Span, Target, Tensors

__all__ = ["double_backward"]

Array = NDArray[Any]


def double_backward(
    t: Tensors, p: Parameters, convolver: Convolver, _: float, *, transposed: bool
) -> list[Target]:
    """Make the targets of a double backward pass; omitted gradients count as zero."""
    one = Conv(t, p, convolver)
    y, x, w = one.activation("grad_output"), one.activation("input"), one.weight()
    ggx = None if t.get("grad_grad_input") is None else one.activation("grad_grad_input")
    ggw = None if t.get("grad_grad_weight") is None else one.weight("grad_grad_weight")
    ggb = t.get("grad_grad_bias")

    def forward(a: Array, b: Array) -> Target:
        if transposed:
            return one.backward_data(a, b, y.shape[3:], "grad_grad_output")
        return one.forward(a, b, "grad_grad_output")

    def to_output() -> Target:
        parts = [] if ggx is None else [forward(ggx, w)]
        parts += [] if ggw is None else [forward(x, ggw)]
        added = None
        if ggb is not None:
            added = wide(ggb).reshape(1, *y.shape[1:3], *(1,) * (y.ndim - 3))
        return _total(convolver, "grad_grad_output", one.see_activation, y.shape, parts, added)

    def to_input() -> Target:
        parts = []
        if ggw is not None and transposed:
            parts = [one.forward(y, ggw, "grad_input", x.shape[3:])]
        elif ggw is not None:
            parts = [one.backward_data(y, ggw, x.shape[3:])]
        return _total(convolver, "grad_input", one.see_activation, x.shape, parts)

    def to_weight() -> Target:
        parts = []
        if ggx is not None:
            sides = (y, ggx) if transposed else (ggx, y)
            parts = [one.backward_weight(*sides, w.shape[3:])]
        return _total(convolver, "grad_weight", one.see_weight, w.shape, parts)

    made: dict[str, Callable[[], Target]] = {
        "grad_grad_output": to_output,
        "grad_input": to_input,
        "grad_weight": to_weight,
    }
    return [made[name]() for name in p.get("outputs", tuple(made))]


def _total(
    convolver: Convolver,
    name: str,
    see: Callable[[Array], Seen],
    shape: tuple[int, ...],
    parts: list[Target],
    added: Array | None = None,
) -> Target:
    if len(parts) == 1 and added is None:
        return parts[0]

    def part(span: Span) -> Reference:
        rows = (span[1] - span[0], *shape[1:])
        value, magnitude, terms = np.zeros(rows), np.zeros(rows), np.zeros(rows, np.int64)
        with np.errstate(all="ignore"):
            for each in parts:
                found = each.part(span)
                value, magnitude = value + found.value, magnitude + found.magnitude
                terms = terms + found.terms
            if added is not None:
                value, magnitude, terms = value + added, magnitude + np.abs(added), terms + 1
        return Reference(value, magnitude, terms)

    def adjoint(z: Float) -> float:
        """Return <output, z>; each part is a convolution of its own."""
        total = sum(
            adjoint_side(each.linear, z, convolver) for each in parts if each.linear is not None
        )
        return total if added is None else total + float((added * z).sum())

    spans = parts[0].spans if parts else ((0, shape[0]),)
    return Target(name, see, spans, part, adjoint=adjoint, shape=shape)
