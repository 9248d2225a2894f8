"""The problems of adaptive max pooling, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from convgrad.contract import AdaptiveMaxPoolBwdRequest, AdaptiveMaxPoolFwdRequest
from convgrad.dtypes import DType
from convgrad_service.problems.avgpool import adaptive, adaptive_output_size
from convgrad_service.problems.base import TensorSpec
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.planes import (
    WindowProblem,
    check_one_source,
    check_plane,
    index_dtype_of,
    source_size,
    ungrouped,
)
from convgrad_service.problems.reading import read_activation, shared_dtype
from convgrad_service.problems.sizes import check_shape, require_shape

__all__ = ["AdaptiveMaxPoolBwd", "AdaptiveMaxPoolFwd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AdaptiveMaxPool(WindowProblem):
    @property
    def valid_flops(self) -> int:
        return self.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveMaxPoolFwd(_AdaptiveMaxPool):
    """output[n, c, o] = the maximum of input[n, c, i] over the window of o.

    Of equal maxima the first wins; a NaN wins over any number, and of several NaNs the last.
    ``indices`` are flat in each (n, c) plane, in ``index_dtype``.

    Shapes: input (N, C, *in) -> output and indices (N, C, *out).
    Dtypes: ``dtype`` and ``index_dtype``.
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's adaptive_max_pool1d to adaptive_max_pool3d.
    """

    return_indices: bool = False
    index_dtype: DType = DType.INT64

    @classmethod
    def from_request(cls, request: AdaptiveMaxPoolFwdRequest) -> Self:
        layout = ungrouped(Layout.of_tensor(request.layout, "input", request.input.shape))
        input = read_activation(layout, "input", request.input.shape)
        problem = cls(
            batch=input.batch,
            channels=input.channels,
            dtype=shared_dtype({"input": request.input}),
            layout=layout,
            deterministic=request.deterministic,
            windows=adaptive(input.size, adaptive_output_size(request.output_size, input.size)),
            return_indices=request.return_indices,
            index_dtype=DType(request.index_dtype),
        )
        for name, spec in problem.outputs.items():
            check_shape(name, spec.shape)
        if problem.return_indices:
            check_plane("index_dtype", problem.index_dtype, input.size)
        return problem

    @property
    def operation(self) -> str:
        return "adaptive_max_pool_fwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {"input": self._spec(self.input_size, self.dtype)}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        specs = {"output": self._spec(self.output_size, self.dtype)}
        if self.return_indices:
            specs["indices"] = self._spec(self.output_size, self.index_dtype)
        return specs


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveMaxPoolBwd(_AdaptiveMaxPool):
    """grad_input[n, c, i] = sum of grad_output[n, c, o] over the windows o whose maximum is at i.

    The maxima are searched for in ``input``, or given by the forward's ``indices``, as ``source``
    says; ``index_dtype`` is None with an input.

    Shapes: grad_output (N, C, *out), input (N, C, *in) or indices (N, C, *out) -> grad_input
    (N, C, *in).
    Dtypes: ``dtype``; sums in float32 (float64 for float64).
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's adaptive_max_pool2d_backward and adaptive_max_pool3d_backward.
    """

    source: Literal["input", "indices"] = "input"
    index_dtype: DType | None = None

    @classmethod
    def from_request(cls, request: AdaptiveMaxPoolBwdRequest) -> Self:
        check_one_source(request.input, request.indices)
        floating = {"grad_output": request.grad_output}
        if request.input is not None:
            floating["input"] = request.input
        dtype = shared_dtype(floating)
        shape = request.grad_output.shape
        layout = ungrouped(Layout.of_tensor(request.layout, "grad_output", shape))
        grad = read_activation(layout, "grad_output", shape)
        size = source_size(layout, grad, request.input, request.input_size)
        indices = request.indices
        problem = cls(
            batch=grad.batch,
            channels=grad.channels,
            dtype=dtype,
            layout=layout,
            deterministic=request.deterministic,
            windows=adaptive(size, grad.size),
            source="input" if indices is None else "indices",
            index_dtype=None if indices is None else index_dtype_of(indices),
        )
        check_shape("grad_input", problem.outputs["grad_input"].shape)
        if indices is not None:
            require_shape("indices", indices.shape, shape, "(grad_output's shape)")
            check_plane("the dtype of indices", problem.index_dtype, size)
        return problem

    @property
    def operation(self) -> str:
        return "adaptive_max_pool_bwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        specs = {"grad_output": self._spec(self.output_size, self.dtype)}
        if self.index_dtype is None:
            return specs | {"input": self._spec(self.input_size, self.dtype)}
        return specs | {"indices": self._spec(self.output_size, self.index_dtype)}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"grad_input": self._spec(self.input_size, self.dtype)}
