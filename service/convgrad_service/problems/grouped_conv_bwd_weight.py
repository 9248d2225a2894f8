"""The problem of grouped_conv_bwd_weight: the gradients of a convolution's weight and bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from numpy.typing import NDArray

from convgrad.contract import GroupedConvBwdWeightRequest
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.base import PLAIN, Epilogue, Piece, TensorSpec
from convgrad_service.problems.consistency import (
    agreed_groups,
    check_output_size,
    divisible,
    same_batch,
)
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.formulas import implied_kernel_size
from convgrad_service.problems.geometry import ConvShape, Span
from convgrad_service.problems.layouts import Layout, weight_shape
from convgrad_service.problems.reading import (
    Steps,
    check_precision,
    read_activation,
    shared_dtype,
    wanted_outputs,
)
from convgrad_service.problems.sizes import (
    Size,
    positive,
    require_shape,
    size_of_length,
    tuple_text,
)
from convgrad_service.problems.slicing import activation_slices, grid, whole

__all__ = ["GroupedConvBwdWeight", "sum_dtype"]

OUTPUTS = ("grad_weight", "grad_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedConvBwdWeight(ConvProblem):
    """grad_weight[k, c, r] = alpha * sum over n, o of grad_output[n, k, o] * input[n, c, i]
    + beta * accumulate[k, c, r], i where (o, r) meet; grad_bias[k] = sum of grad_output[n, k, o].

    The epilogue applies to grad_weight only. Outputs and accumulate have ``weight_dtype``.
    ``split_k`` is None for auto.

    Shapes: input (N, C, *in), grad_output (N, K, *out) -> grad_weight (K, C/G, *kernel), grad_bias
    (K,).
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: composable_kernel's grouped_conv_bwd_weight, PyTorch's convolution_backward.
    """

    weight_dtype: DType
    epilogue: Epilogue = PLAIN
    split_k: int | None = None
    wanted: tuple[str, ...] = ("grad_weight",)

    @classmethod
    def from_request(cls, request: GroupedConvBwdWeightRequest) -> Self:
        dtype = shared_dtype({"input": request.input, "grad_output": request.grad_output})
        layout = Layout.of_tensor(request.layout, "input", request.input.shape)
        input = read_activation(layout, "input", request.input.shape)
        grad = read_activation(layout, "grad_output", request.grad_output.shape)
        steps = Steps.of(request, layout.ndim)
        groups = agreed_groups(layout, request.groups, input, grad)
        same_batch(grad, input)
        divisible("input", input.channels, groups)
        divisible("grad_output", grad.channels, groups)
        conv = ConvShape(
            batch=input.batch,
            groups=groups,
            in_channels=input.channels,
            out_channels=grad.channels,
            input_size=input.size,
            kernel_size=implied_kernel_size(input.size, grad.size, *steps)
            if request.weight_size is None
            else _kernel(layout, request.weight_size, groups, input.channels, grad.channels),
            output_size=grad.size,
            **steps._asdict(),
        )
        check_output_size(layout, "grad_output", grad.shape, conv)
        problem = cls(
            conv=conv,
            dtype=dtype,
            layout=layout,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
            weight_dtype=_weight_dtype(dtype, request.weight_dtype),
            epilogue=Epilogue.of(request.alpha, request.beta, request.accumulate),
            split_k=None if request.split_k == "auto" else positive("split_k", request.split_k),
            wanted=wanted_outputs(request.outputs, OUTPUTS),
        )
        problem._check_outputs()
        if request.accumulate is not None:
            problem._check_accumulate(request.accumulate)
        return problem

    def _check_accumulate(self, accumulate: NDArray[Any]) -> None:
        if "grad_weight" not in self.wanted:
            raise InvalidProblem(
                "there is an accumulate but outputs lacks grad_weight, to which it is added; "
                "expected both or neither"
            )
        shape = self.weight_spec.shape
        require_shape("accumulate", accumulate.shape, shape, "(grad_weight's shape)")
        if accumulate.dtype != self.weight_dtype.numpy:
            raise InvalidProblem(
                f"accumulate has dtype {accumulate.dtype}; expected {self.weight_dtype}, "
                "grad_weight's"
            )

    @property
    def operation(self) -> str:
        return "grouped_conv_bwd_weight"

    @property
    def flops(self) -> int:
        return self._count(self.conv.flops)

    @property
    def valid_flops(self) -> int:
        return self._count(self.conv.valid_flops)

    def _count(self, weight_flops: int) -> int:
        """Count the products of grad_weight and the additions of grad_bias."""
        bias_flops = self.output_spec.elements
        return weight_flops * ("grad_weight" in self.wanted) + bias_flops * (
            "grad_bias" in self.wanted
        )

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        specs = {"grad_output": self.output_spec}
        if "grad_weight" in self.wanted:
            specs = {"input": self.input_spec, **specs}
        if self.epilogue.accumulate:
            specs["accumulate"] = TensorSpec(self.weight_spec.shape, self.weight_dtype)
        return specs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        specs = {"grad_weight": self.weight_spec, "grad_bias": self.bias_spec}
        return {
            name: TensorSpec(specs[name].shape, self.weight_dtype)
            for name in OUTPUTS
            if name in self.wanted
        }

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, then by rows of grad_output, each with the rows of input that they meet.

        Pieces are plain sums in float32 (float64 for float64); `finish` applies the epilogue to
        their sum and rounds it.
        """
        cuts = list(grid(self.conv.batch, self.conv.output_size[0], parts))
        if len(cuts) == 1:
            return (Piece.whole(self),)
        partial = replace(self, weight_dtype=sum_dtype(self.dtype), epilogue=PLAIN)
        return tuple(partial._piece(samples, rows) for samples, rows in cuts)

    def _piece(self, samples: Span, rows: Span) -> Piece:
        met = self.conv.inputs_for(0, rows)
        conv = self.conv.window(0, met, rows).with_batch(samples[1] - samples[0])
        slices = {
            "input": activation_slices(self.layout, samples, met),
            "grad_output": activation_slices(self.layout, samples, rows),
        }
        return Piece(
            replace(self, conv=conv),
            {name: slices[name] for name in self.inputs},
            {name: whole(len(spec.shape)) for name, spec in self.outputs.items()},
            dict.fromkeys(self.outputs, "sum"),
        )

    def finish(
        self, name: str, total: NDArray[Any], tensors: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        if name == "grad_weight" and not self.epilogue.trivial:
            # One output channel at a time: a second array of the weight's size could be large.
            factor, beta = (total.dtype.type(f) for f in (self.epilogue.alpha, self.epilogue.beta))
            for k, row in enumerate(total):
                row *= factor
                if self.epilogue.accumulate:
                    row += tensors["accumulate"][k].astype(total.dtype) * beta
        return total.astype(self.weight_dtype.numpy, copy=False)


def sum_dtype(dtype: DType) -> DType:
    """Return the type in which products are summed until they are rounded once."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


def _kernel(
    layout: Layout, stated: Sequence[int], groups: int, in_channels: int, out_channels: int
) -> Size:
    """Return the kernel size in ``weight_size``, which may be a full shape in the layout."""
    order = ", ".join(layout.weight)
    if not size_of_length("weight_size", stated, layout.ndim, layout.rank, order):
        return tuple(stated)
    kernel = layout.weight_sizes(stated)[3]
    expected = weight_shape(layout, groups, in_channels, out_channels, kernel)
    if tuple(stated) != expected:
        raise InvalidProblem(
            f"weight_size is {tuple_text(stated)}; expected {tuple_text(expected)} ({order}) from "
            f"input's {in_channels} channels, grad_output's {out_channels} and groups {groups}"
        )
    return kernel


def _weight_dtype(dtype: DType, stated: str | None) -> DType:
    """Return the dtype of the outputs: that of the inputs, or float32 for 16-bit inputs."""
    if stated is None or stated == dtype:
        return dtype
    if stated == DType.FLOAT32 and dtype.itemsize == 2:
        return DType.FLOAT32
    offers = f"{dtype} or float32" if dtype.itemsize == 2 else str(dtype)
    raise InvalidProblem(f"weight_dtype is {stated[:32]!r}; expected {offers} for {dtype} inputs")
