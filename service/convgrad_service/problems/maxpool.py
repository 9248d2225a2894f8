"""The problems of max pooling, forward and backward, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Self

from convgrad.contract import MaxPoolBwdRequest, MaxPoolFwdRequest
from convgrad.dtypes import DType
from convgrad_service.problems.base import Piece, Problem, TensorSpec
from convgrad_service.problems.formulas import pool_output_size
from convgrad_service.problems.geometry import PoolShape, Span
from convgrad_service.problems.layouts import Layout, activation_shape
from convgrad_service.problems.planes import (
    check_one_source,
    check_plane,
    index_dtype_of,
    source_size,
    ungrouped,
)
from convgrad_service.problems.reading import Activation, Steps, read_activation, shared_dtype
from convgrad_service.problems.sizes import Size, check_shape, per_dimension, require_shape
from convgrad_service.problems.slicing import activation_slices, grid

__all__ = ["MaxPoolBwd", "MaxPoolFwd"]

# Spatial dimensions of each operation: one class serves all of them.
_NDIM = {f"maxpool{ndim}d_{way}": ndim for ndim in (1, 2, 3) for way in ("fwd", "bwd")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MaxPool(Problem):
    pool: PoolShape
    dtype: DType
    layout: Layout
    deterministic: bool = True

    @property
    def flops(self) -> int:
        return self.pool.flops

    @property
    def valid_flops(self) -> int:
        return self.pool.valid_flops

    def _spec(self, size: Size, dtype: DType) -> TensorSpec:
        pool = self.pool
        return TensorSpec(activation_shape(self.layout, pool.batch, 1, pool.channels, size), dtype)

    def _shift(self, row: int) -> int:
        """Return the flat index in a plane of the first element of an input row."""
        return row * prod(self.pool.input_size[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolFwd(_MaxPool):
    """output[n, c, o] = max over r of input[n, c, i], i where (o, r) meet.

    Of equal maxima the first wins; a NaN wins over any number, and of several NaNs the last.
    ``indices`` are flat in each (n, c) plane, in ``index_dtype``.

    Shapes: input (N, C, *in) -> output and indices (N, C, *out).
    Dtypes: ``dtype`` and ``index_dtype``.
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's max_pool1d to max_pool3d, with ONNX's padding.
    """

    return_indices: bool = False
    index_dtype: DType = DType.INT64

    @classmethod
    def from_request(cls, request: MaxPoolFwdRequest) -> Self:
        dtype = shared_dtype({"input": request.input})
        layout = _layout(request)
        input = read_activation(layout, "input", request.input.shape)
        problem = cls(
            pool=_pool(request, layout, input, input.size),
            dtype=dtype,
            layout=layout,
            deterministic=request.deterministic,
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
        return f"maxpool{self.pool.ndim}d_fwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {"input": self._spec(self.pool.input_size, self.dtype)}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        specs = {"output": self._spec(self.pool.output_size, self.dtype)}
        if self.return_indices:
            specs["indices"] = self._spec(self.pool.output_size, self.index_dtype)
        return specs

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, then by rows of output with the rows of input that they read."""
        pieces = []
        for samples, rows in grid(self.pool.batch, self.pool.output_size[0], parts):
            read = self.pool.inputs_for(0, rows)
            pool = self.pool.window(0, read, rows).with_batch(samples[1] - samples[0])
            result = activation_slices(self.layout, samples, rows)
            pieces.append(
                Piece(
                    replace(self, pool=pool),
                    {"input": activation_slices(self.layout, samples, read)},
                    dict.fromkeys(self.outputs, result),
                    dict.fromkeys(self.outputs, "concatenate"),
                    shifts={"indices": self._shift(read[0])},
                )
            )
        return tuple(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolBwd(_MaxPool):
    """grad_input[n, c, i] = sum of grad_output[n, c, o] over the windows o whose maximum is at i.

    The maxima are searched for in ``input``, or given by the forward's ``indices``, as ``source``
    says; ``index_dtype`` is None with an input.

    Shapes: grad_output (N, C, *out), input (N, C, *in) or indices (N, C, *out) -> grad_input
    (N, C, *in).
    Dtypes: ``dtype``; sums in float32 (float64 for float64).
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's max_pool2d_with_indices_backward; composable_kernel's maxpool_bwd.
    """

    source: Literal["input", "indices"] = "input"
    index_dtype: DType | None = None

    @classmethod
    def from_request(cls, request: MaxPoolBwdRequest) -> Self:
        check_one_source(request.input, request.indices)
        floating = {"grad_output": request.grad_output}
        if request.input is not None:
            floating["input"] = request.input
        dtype = shared_dtype(floating)
        layout = _layout(request)
        grad = read_activation(layout, "grad_output", request.grad_output.shape)
        size = source_size(layout, grad, request.input, request.input_size)
        pool = _pool(request, layout, grad, size)
        problem = cls(
            pool=pool,
            dtype=dtype,
            layout=layout,
            deterministic=request.deterministic,
            source="input" if request.indices is None else "indices",
            index_dtype=None if request.indices is None else index_dtype_of(request.indices),
        )
        require_shape(
            "grad_output",
            grad.shape,
            problem._spec(pool.output_size, dtype).shape,
            f"from input size {size}, {pool.geometry_text}, ceil_mode {pool.ceil_mode}",
        )
        check_shape("grad_input", problem.outputs["grad_input"].shape)
        if request.indices is not None:
            require_shape("indices", request.indices.shape, grad.shape, "(grad_output's shape)")
            check_plane("the dtype of indices", problem.index_dtype, size)
        return problem

    @property
    def operation(self) -> str:
        return f"maxpool{self.pool.ndim}d_bwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        specs = {"grad_output": self._spec(self.pool.output_size, self.dtype)}
        if self.index_dtype is None:
            return specs | {"input": self._spec(self.pool.input_size, self.dtype)}
        return specs | {"indices": self._spec(self.pool.output_size, self.index_dtype)}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"grad_input": self._spec(self.pool.input_size, self.dtype)}

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, then by rows of grad_input.

        A piece has every window that reads its rows, and all rows of those windows, so that it
        finds the same maxima as the whole. Only its own rows of the result are used. It begins at a
        multiple of the windows that a row is in, which decide the order of additions.
        """
        cuts = grid(self.pool.batch, self.pool.input_size[0], parts)
        return tuple(self._piece(samples, rows) for samples, rows in cuts)

    def _piece(self, samples: Span, rows: Span) -> Piece:
        touching = self.pool.outputs_for(0, rows)
        reach = (self.pool.kernel_size[0] - 1) * self.pool.dilation[0] + 1
        touching = touching[0] - touching[0] % -(-reach // self.pool.stride[0]), touching[1]
        read = self.pool.inputs_for(0, touching)
        read = min(read[0], rows[0]), max(read[1], rows[1])
        pool = self.pool.window(0, read, touching).with_batch(samples[1] - samples[0])
        slices = {
            "grad_output": activation_slices(self.layout, samples, touching),
            "input": activation_slices(self.layout, samples, read),
            "indices": activation_slices(self.layout, samples, touching),
        }
        all_samples = (0, samples[1] - samples[0])
        own = rows[0] - read[0], rows[1] - read[0]
        return Piece(
            replace(self, pool=pool),
            {name: slices[name] for name in self.inputs},
            {"grad_input": activation_slices(self.layout, samples, rows)},
            {"grad_input": "concatenate"},
            take={"grad_input": activation_slices(self.layout, all_samples, own)},
            shifts={"indices": self._shift(read[0])},
        )


def _layout(request: MaxPoolFwdRequest | MaxPoolBwdRequest) -> Layout:
    return ungrouped(Layout.parse(request.layout, _NDIM[request.operation]))


def _pool(
    request: MaxPoolFwdRequest | MaxPoolBwdRequest, layout: Layout, tensor: Activation, size: Size
) -> PoolShape:
    """Return the pooling of an input of ``size`` with the batch and channels of ``tensor``."""
    kernel = per_dimension("kernel_size", request.kernel_size, layout.ndim)
    stride = request.kernel_size if request.stride is None else request.stride
    steps = Steps.checked(stride, request.padding, request.dilation, layout.ndim)
    return PoolShape(
        batch=tensor.batch,
        channels=tensor.channels,
        input_size=size,
        kernel_size=kernel,
        output_size=pool_output_size(size, kernel, *steps, ceil_mode=request.ceil_mode),
        ceil_mode=request.ceil_mode,
        **steps._asdict(),
    )
