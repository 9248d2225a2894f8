"""Overrides of ATen's pooling operators for `use`, forward and backward.

ATen composes some of them of other operators, at a cost to a backend that computes forward passes;
for such a backend these take another path:

- ``aten::max_pool2d`` is ``max_pool2d_with_indices``, and indices are half of what it reads and
  writes. ``max_pool2d_backward``, which ATen has for other devices, needs none.
- ``aten::adaptive_avg_pool2d`` to one output is a mean, whose gradient is not in the memory format
  of its input; here it is ``_adaptive_avg_pool2d``.

Whatever has to see or differentiate the composition gets it: graphs of ``torch.compile``, modes,
functorch, forward-mode and second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from convgrad.errors import ServiceError
from convgrad.torch._choice import CHOICE, left_to_pytorch, shapes, takes_forward
from convgrad.torch._pool_passes import POOL_BACKWARDS, POOL_FORWARDS
from convgrad.torch._prepared import why_not
from convgrad.torch._report import count_left
from convgrad.torch._tensors import is_transformed

__all__ = ["POOLINGS", "POOLING_COMPOSITIONS", "Own"]

Tensor: TypeAlias = torch.Tensor
Own: TypeAlias = Callable[..., Any]
"""PyTorch's own kernel for an operator, which takes the operator's arguments."""

_ATEN: Any = torch.ops.aten


def _pooling(
    operator: str, compute: Callable[..., Any], *, forward: bool
) -> Callable[[Own], Callable[..., Any]]:
    def make(own: Own) -> Callable[..., Any]:
        def override(*given: Any) -> Any:
            backend, input = CHOICE.backend, given[0 if forward else 1]
            if backend is not None and (not forward or takes_forward(backend, input)):
                try:
                    found = compute(backend, *given)
                    if found is not None:
                        return found
                except ServiceError as error:
                    if not left_to_pytorch(error, input):
                        raise
                    count_left(operator, shapes(input), error.detail)
            return own(*given)

        return override

    return make


def _with_indices(
    grad_output: Tensor,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Any:
    """Compute ``aten::max_pool2d_backward`` by operators that have second derivatives."""
    geometry = kernel_size, stride, padding, dilation, ceil_mode
    with torch.no_grad():
        _, indices = _ATEN.max_pool2d_with_indices(input, *geometry)
    return _ATEN.max_pool2d_with_indices_backward(grad_output, input, *geometry, indices)


def _observed(tensor: Tensor) -> bool:
    """Return whether more than ATen's first derivatives are asked of an operator."""
    return (
        type(tensor) is not Tensor or torch._C._len_torch_dispatch_stack() > 0 or is_transformed()
    )


def _composed(
    operator: str, ndim: int, way: Own | None = None
) -> Callable[[Own], Callable[..., Any]]:
    """Have ``way``, or autograd's own kernel, compute what a backend in use takes."""
    composition = getattr(_ATEN, operator).default.decompose

    def make(own: Own) -> Callable[..., Any]:
        taken = way or own

        def override(input: Tensor, *rest: Any) -> Any:
            backend = CHOICE.backend
            takes = (
                backend is not None
                and takes_forward(backend, input)
                and input.dim() == ndim + 2
                and why_not(input) is None
                and not _observed(input)
            )
            return (taken if takes else composition)(input, *rest)

        return override

    return make


def _adaptive_avg(ndim: int) -> Own:
    operator = getattr(_ATEN, f"_adaptive_avg_pool{ndim}d").default

    def forward(input: Tensor, output_size: Sequence[int]) -> Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            # The gradient depends on no element of the input. What autograd keeps has a version of
            # its own, so that the program may change the input in place, as after a mean.
            input = _ATEN._unsafe_view.default(input, input.shape)
        pooled: Tensor = operator(input, output_size)
        return pooled

    return forward


def _max_pool2d_backward(own: Own) -> Callable[..., Any]:
    def override(grad_output: Tensor, *given: Any) -> Any:
        again = torch.is_grad_enabled() or _observed(grad_output)
        return (_with_indices if again else own)(grad_output, *given)

    return override


POOLINGS: dict[str, Callable[[Own], Callable[..., Any]]] = {
    **{name: _pooling(name, run, forward=False) for name, run in POOL_BACKWARDS.items()},
    **{name: _pooling(name, run, forward=True) for name, run in POOL_FORWARDS.items()},
    # ATen has no kernel of it for these devices.
    "max_pool2d_backward": lambda _: _pooling(
        "max_pool2d_backward", POOL_BACKWARDS["max_pool2d_backward"], forward=False
    )(_with_indices),
}
"""Functions that make an operator's override of its own kernel, by the names of ATen's operators.

After these, autograd's kernel of ``max_pool2d`` is the one that keeps no indices.
"""

POOLING_COMPOSITIONS: dict[str, Callable[[Own], Callable[..., Any]]] = {
    "max_pool2d": _composed("max_pool2d", 2),
    "max_pool2d_backward": _max_pool2d_backward,
    "adaptive_avg_pool2d": _composed("adaptive_avg_pool2d", 2, _adaptive_avg(2)),
    "adaptive_avg_pool3d": _composed("adaptive_avg_pool3d", 3, _adaptive_avg(3)),
}
"""The same for autograd's kernels."""
