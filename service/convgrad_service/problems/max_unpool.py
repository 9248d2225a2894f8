"""The problems of max unpooling, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

from convgrad.contract import MaxUnpoolBwdRequest, MaxUnpoolFwdRequest
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.base import TensorSpec
from convgrad_service.problems.layouts import Layout, activation_shape
from convgrad_service.problems.planes import PlaneProblem, check_plane, index_dtype_of, ungrouped
from convgrad_service.problems.reading import Activation, read_activation, shared_dtype
from convgrad_service.problems.sizes import (
    Size,
    check_shape,
    per_dimension,
    require_shape,
    show,
    size_of_length,
    tuple_text,
)
from convgrad_service.problems.windows import WindowAxis

__all__ = ["MaxUnpoolBwd", "MaxUnpoolFwd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MaxUnpool(PlaneProblem):
    """``input_size`` is the pooled size, ``output_size`` that of the planes that indices index."""

    input_size: Size
    output_size: Size
    index_dtype: DType

    @property
    def flops(self) -> int:
        """One copy for each element of the input."""
        return self.batch * self.channels * prod(self.input_size)

    @property
    def valid_flops(self) -> int:
        return self.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxUnpoolFwd(_MaxUnpool):
    """output[n, c, indices[n, c, i]] = input[n, c, i], zero elsewhere; the last i wins.

    ``windows`` contain the valid indices of each input position; None if one contains no output.

    Shapes: input and indices (N, C, *in) -> output (N, C, *out).
    Dtypes: ``dtype`` and ``index_dtype``.
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's max_unpool1d to max_unpool3d.
    """

    windows: tuple[WindowAxis, ...] | None = None

    @classmethod
    def from_request(cls, request: MaxUnpoolFwdRequest) -> Self:
        layout = ungrouped(Layout.of_tensor(request.layout, "input", request.input.shape))
        input = read_activation(layout, "input", request.input.shape)
        kernel = per_dimension("kernel_size", request.kernel_size, layout.ndim)
        stride = kernel
        if request.stride is not None:
            stride = per_dimension("stride", request.stride, layout.ndim)
        padding = per_dimension("padding", request.padding, layout.ndim, minimum=0)
        size = _output_size(request, layout, input, kernel, stride, padding)
        windows = tuple(map(WindowAxis.sliding, size, input.size, kernel, stride, padding))
        # Starts and stops are non-decreasing, so the first and last window suffice.
        nonempty = all(
            axis.start(o) < axis.stop(o) for axis in windows for o in (0, axis.output - 1)
        )
        problem = cls(
            batch=input.batch,
            channels=input.channels,
            dtype=shared_dtype({"input": request.input}),
            layout=layout,
            deterministic=request.deterministic,
            input_size=input.size,
            output_size=size,
            index_dtype=index_dtype_of(request.indices),
            windows=windows if nonempty else None,
        )
        check_shape("output", problem.outputs["output"].shape)
        require_shape("indices", request.indices.shape, input.shape, "(input's shape)")
        check_plane("the dtype of indices", problem.index_dtype, size, "the output")
        return problem

    @property
    def operation(self) -> str:
        return "max_unpool_fwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {
            "input": self._spec(self.input_size, self.dtype),
            "indices": self._spec(self.input_size, self.index_dtype),
        }

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"output": self._spec(self.output_size, self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxUnpoolBwd(_MaxUnpool):
    """grad_input[n, c, i] = grad_output[n, c, indices[n, c, i]].

    Shapes: grad_output (N, C, *out), indices (N, C, *in) -> grad_input (N, C, *in).
    Dtypes: ``dtype`` and ``index_dtype``.
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes or types contradict each other.
    Source: PyTorch's max_unpool1d to max_unpool3d.
    """

    @classmethod
    def from_request(cls, request: MaxUnpoolBwdRequest) -> Self:
        shape = request.grad_output.shape
        layout = ungrouped(Layout.of_tensor(request.layout, "grad_output", shape))
        grad = read_activation(layout, "grad_output", shape)
        indices = read_activation(layout, "indices", request.indices.shape)
        expected = activation_shape(layout, grad.batch, 1, grad.channels, indices.size)
        require_shape("indices", indices.shape, expected, "from grad_output's N and C")
        problem = cls(
            batch=grad.batch,
            channels=grad.channels,
            dtype=shared_dtype({"grad_output": request.grad_output}),
            layout=layout,
            deterministic=request.deterministic,
            input_size=indices.size,
            output_size=grad.size,
            index_dtype=index_dtype_of(request.indices),
        )
        check_plane("the dtype of indices", problem.index_dtype, grad.size, "grad_output")
        return problem

    @property
    def operation(self) -> str:
        return "max_unpool_bwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {
            "grad_output": self._spec(self.output_size, self.dtype),
            "indices": self._spec(self.input_size, self.index_dtype),
        }

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"grad_input": self._spec(self.input_size, self.dtype)}


def _output_size(
    request: MaxUnpoolFwdRequest,
    layout: Layout,
    input: Activation,
    kernel: Size,
    stride: Size,
    padding: Size,
) -> Size:
    """Return the requested size, which is within a stride of the pooling's, or the pooling's."""
    implied = tuple(
        (size - 1) * s + k - 2 * p
        for size, k, s, p in zip(input.size, kernel, stride, padding, strict=True)
    )
    if request.output_size is None:
        if min(implied) < 1:
            raise InvalidProblem(
                f"the output would have size {tuple_text(implied)}; expected at least 1 in every "
                "dimension"
            )
        return implied
    order = ", ".join(layout.activation)
    size = tuple(request.output_size)
    if size_of_length("output_size", size, layout.ndim, layout.rank, order):
        size = layout.activation_sizes(size)[3]
        expected = activation_shape(layout, input.batch, 1, input.channels, size)
        require_shape("output_size", request.output_size, expected, "from input's N and C")
    for i, (extent, meant, s) in enumerate(zip(size, implied, stride, strict=True)):
        if abs(extent - meant) >= s:
            raise InvalidProblem(
                f"output_size is {show(extent)} in spatial dimension {i}; expected more than "
                f"{show(meant - s)} and less than {show(meant + s)}, from kernel_size, stride and "
                "padding"
            )
    return size
