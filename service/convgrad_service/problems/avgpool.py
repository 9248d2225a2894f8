"""The problems of average pooling, over sliding windows or adaptive ones, and of its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Self

from convgrad.contract import (
    AdaptiveAvgPoolBwdRequest,
    AdaptiveAvgPoolFwdRequest,
    AvgPoolBwdRequest,
    AvgPoolFwdRequest,
)
from convgrad.errors import InvalidProblem
from convgrad_service.problems.base import TensorSpec
from convgrad_service.problems.formulas import pool_output_size
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.planes import WindowProblem, ungrouped
from convgrad_service.problems.reading import (
    Steps,
    input_size_of,
    read_activation,
    shared_dtype,
)
from convgrad_service.problems.sizes import (
    InconsistentSizes,
    Size,
    by,
    check_shape,
    one_or_by,
    pads_text,
    per_dimension,
    positive,
    require_shape,
    show,
    tuple_text,
)
from convgrad_service.problems.windows import WindowAxis

__all__ = [
    "AdaptiveAvgPoolBwd",
    "AdaptiveAvgPoolFwd",
    "AvgPoolBwd",
    "AvgPoolFwd",
    "adaptive_output_size",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _AvgPool(WindowProblem):
    """A window's divisor is ``divisor``, or else the product of its sizes in ``counted``."""

    counted: tuple[WindowAxis, ...]
    divisor: int | None = None

    @property
    def valid_flops(self) -> int:
        return self.batch * self.channels * prod(axis.valid_taps for axis in self.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class AvgPoolFwd(_AvgPool):
    """output[n, c, o] = (sum of input[n, c, i] over the window of o) / divisor[o].

    Shapes: input (N, C, *in) -> output (N, C, *out).
    Dtypes: ``dtype``; sums in float32 (float64 for float64), divided before the one rounding.
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's avg_pool1d to avg_pool3d, with ONNX's padding.
    """

    @classmethod
    def from_request(cls, request: AvgPoolFwdRequest) -> Self:
        layout = ungrouped(Layout.of_tensor(request.layout, "input", request.input.shape))
        input = read_activation(layout, "input", request.input.shape)
        windows, counted = _sliding(request, input.size)
        return cls._of(request, layout, windows, counted, request.divisor_override)

    @classmethod
    def _of(
        cls,
        request: AvgPoolFwdRequest | AdaptiveAvgPoolFwdRequest,
        layout: Layout,
        windows: tuple[WindowAxis, ...],
        counted: tuple[WindowAxis, ...],
        divisor: int | None = None,
    ) -> Self:
        input = read_activation(layout, "input", request.input.shape)
        problem = cls(
            batch=input.batch,
            channels=input.channels,
            dtype=shared_dtype({"input": request.input}),
            layout=layout,
            deterministic=request.deterministic,
            windows=windows,
            counted=counted,
            divisor=divisor,
        )
        check_shape("output", problem.outputs["output"].shape)
        return problem

    @property
    def operation(self) -> str:
        return "avg_pool_fwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {"input": self._spec(self.input_size, self.dtype)}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"output": self._spec(self.output_size, self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveAvgPoolFwd(AvgPoolFwd):
    """output[n, c, o] = the mean of input[n, c, i] over the adaptive window of o.

    Shapes: input (N, C, *in) -> output (N, C, *out), as requested.
    Dtypes: ``dtype``; sums in float32 (float64 for float64), divided before the one rounding.
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's adaptive_avg_pool1d to adaptive_avg_pool3d.
    """

    @classmethod
    def from_request(cls, request: AdaptiveAvgPoolFwdRequest) -> Self:  # type: ignore[override]
        layout = ungrouped(Layout.of_tensor(request.layout, "input", request.input.shape))
        size = read_activation(layout, "input", request.input.shape).size
        windows = adaptive(size, adaptive_output_size(request.output_size, size))
        return cls._of(request, layout, windows, windows)

    @property
    def operation(self) -> str:
        return "adaptive_avg_pool_fwd"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvgPoolBwd(_AvgPool):
    """grad_input[n, c, i] = sum of grad_output[n, c, o] / divisor[o] over windows containing i.

    Shapes: grad_output (N, C, *out) -> grad_input (N, C, *in).
    Dtypes: ``dtype``; sums in float32 (float64 for float64).
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's avg_pool2d_backward and avg_pool3d_backward.
    """

    @classmethod
    def from_request(cls, request: AvgPoolBwdRequest) -> Self:
        layout, size = _read_gradient(request)
        windows, counted = _sliding(request, size)
        problem = cls._of(request, layout, windows, counted, request.divisor_override)
        steps = _steps(request, layout.ndim)
        kernel = per_dimension("kernel_size", request.kernel_size, layout.ndim)
        require_shape(
            "grad_output",
            request.grad_output.shape,
            problem.inputs["grad_output"].shape,
            f"from input size {tuple_text(size)}, kernel {by(kernel)}, stride "
            f"{one_or_by(steps.stride)}, padding {pads_text(steps.padding)}, ceil_mode "
            f"{request.ceil_mode}",
        )
        return problem

    @classmethod
    def _of(
        cls,
        request: AvgPoolBwdRequest | AdaptiveAvgPoolBwdRequest,
        layout: Layout,
        windows: tuple[WindowAxis, ...],
        counted: tuple[WindowAxis, ...],
        divisor: int | None = None,
    ) -> Self:
        grad = read_activation(layout, "grad_output", request.grad_output.shape)
        problem = cls(
            batch=grad.batch,
            channels=grad.channels,
            dtype=shared_dtype({"grad_output": request.grad_output}),
            layout=layout,
            deterministic=request.deterministic,
            windows=windows,
            counted=counted,
            divisor=divisor,
        )
        check_shape("grad_input", problem.outputs["grad_input"].shape)
        return problem

    @property
    def operation(self) -> str:
        return "avg_pool_bwd"

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {"grad_output": self._spec(self.output_size, self.dtype)}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {"grad_input": self._spec(self.input_size, self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveAvgPoolBwd(AvgPoolBwd):
    """grad_input[n, c, i] = sum of grad_output[n, c, o] / size[o] over windows containing i.

    Shapes: grad_output (N, C, *out) -> grad_input (N, C, *in).
    Dtypes: ``dtype``; sums in float32 (float64 for float64).
    Layout: ``layout``, channels first or last.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: PyTorch's _adaptive_avg_pool2d_backward and _adaptive_avg_pool3d_backward.
    """

    @classmethod
    def from_request(cls, request: AdaptiveAvgPoolBwdRequest) -> Self:  # type: ignore[override]
        layout, size = _read_gradient(request)
        grad = read_activation(layout, "grad_output", request.grad_output.shape)
        windows = adaptive(size, grad.size)
        return cls._of(request, layout, windows, windows)

    @property
    def operation(self) -> str:
        return "adaptive_avg_pool_bwd"


def adaptive(input_size: Size, output_size: Size) -> tuple[WindowAxis, ...]:
    """Return adaptive windows for each dimension."""
    return tuple(map(WindowAxis.adaptive, input_size, output_size))


def adaptive_output_size(asked: int | tuple[int | None, ...], input_size: Size) -> Size:
    """Return an adaptive pooling's output size; None in a dimension means the input's size.

    Raises
    ------
    InvalidProblem
        The number of values is wrong, or one is less than 1.
    """
    ndim = len(input_size)
    values = (asked,) * ndim if isinstance(asked, int) else asked
    if len(values) != ndim:
        raise InconsistentSizes(
            f"output_size has {show(len(values))} values; expected one integer, or {ndim} (one per "
            "spatial dimension, null for the input's own)"
        )
    return tuple(
        size if value is None else positive(f"output_size[{i}]", value)
        for i, (value, size) in enumerate(zip(values, input_size, strict=True))
    )


def _read_gradient(
    request: AvgPoolBwdRequest | AdaptiveAvgPoolBwdRequest,
) -> tuple[Layout, Size]:
    """Return the layout and the size of the input."""
    shape = request.grad_output.shape
    layout = ungrouped(Layout.of_tensor(request.layout, "grad_output", shape))
    grad = read_activation(layout, "grad_output", shape)
    return layout, input_size_of(layout, request.input_size, grad.batch, 1, grad.channels)


def _steps(request: AvgPoolFwdRequest | AvgPoolBwdRequest, ndim: int) -> Steps:
    stride = request.kernel_size if request.stride is None else request.stride
    return Steps.checked(stride, request.padding, 1, ndim)


def _sliding(
    request: AvgPoolFwdRequest | AvgPoolBwdRequest, input_size: Size
) -> tuple[tuple[WindowAxis, ...], tuple[WindowAxis, ...]]:
    """Return the windows, and the windows whose positions count in the divisor."""
    if request.divisor_override == 0:
        raise InvalidProblem("divisor_override is 0; expected any other integer")
    ndim = len(input_size)
    kernel = per_dimension("kernel_size", request.kernel_size, ndim)
    steps = _steps(request, ndim)
    output_size = pool_output_size(input_size, kernel, *steps, ceil_mode=request.ceil_mode)
    befores = [before for before, _ in steps.padding]
    windows = tuple(map(WindowAxis.sliding, input_size, output_size, kernel, steps.stride, befores))
    if not request.count_include_pad:
        return windows, windows
    pairs = zip(windows, steps.padding, strict=True)
    return windows, tuple(axis.counting_padding(*pads) for axis, pads in pairs)
