"""What a refusal says about the layout in which the tensors of a request were read."""

from __future__ import annotations

from typing import Any

from convgrad_service.problems.layouts import Layout

__all__ = ["layout_note"]

_ACTIVATIONS = ("input", "grad_output")
_WEIGHTS = ("weight", "weight0")


def layout_note(request: Any) -> str:
    """Return a clause with the layout of a request, empty for operations without layouts.

    PyTorch's weights are KCRS in every memory format, and it accepts samples without a batch
    dimension, so sizes often contradict each other because they were meant in another layout.
    """
    fields = type(request).model_fields
    if "layout" not in fields:
        return ""
    weights = bool(fields.keys() & set(_WEIGHTS))
    if request.layout is not None:
        return f"; layout is {_layout(Layout.named(request.layout), weights=weights)}"
    shapes = (getattr(request, name, None) for name in _ACTIVATIONS)
    ndim = next(array.ndim for array in shapes if array is not None) - 2
    note = f"; layout is {_layout(Layout.parse(None, ndim), weights=weights)}, by default"
    return f"{note} (a single image needs a batch dimension too, N = 1)" if ndim == 1 else note


def _layout(layout: Layout, *, weights: bool) -> str:
    return f"{layout.name}, weights {layout.weight}" if weights else layout.name
