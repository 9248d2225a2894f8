"""The problem of conv3d_backprop_input: conv_bwd_data in Ascend's formats, whole or a region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from convgrad.contract import Conv3dBackpropInputRequest, Region
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.base import Piece, Problem, Slices, TensorSpec
from convgrad_service.problems.consistency import divisible
from convgrad_service.problems.conv_bwd_data import ConvBwdData
from convgrad_service.problems.formats3d import (
    ACTIVATION_FORMATS,
    WEIGHT_FORMATS,
    ActivationFormat,
    WeightFormat,
)
from convgrad_service.problems.formulas import conv_output_size, minimal_input_size
from convgrad_service.problems.geometry import ConvShape, Span
from convgrad_service.problems.layouts import LAYOUTS
from convgrad_service.problems.reading import (
    Steps,
    check_precision,
    input_size_of,
    read_output_padding,
    shared_dtype,
)
from convgrad_service.problems.sizes import (
    Size,
    check_shape,
    positive,
    require_shape,
    show,
    tuple_text,
)
from convgrad_service.problems.slicing import grid, whole

__all__ = ["Conv3dBackpropInput"]

_PLAIN = LAYOUTS["NCDHW"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conv3dBackpropInput(Problem):
    """grad_input of a 3D convolution, whole or for a region in depth and height.

    ``conv`` is the forward convolution of the region: its input is the region, its padding is
    relative to the region, and its output is all of grad_output. So ``plain`` is an ordinary
    conv_bwd_data, and only the formats are specific to this problem.

    Shapes: grad_output (N, K, D, H, W), weight (K, C/G, T, R, S) -> grad_input (N, C, D, H, W),
    each in its format.
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: one format for each tensor, see `formats3d`.

    Raises (from_request):
        InvalidProblem: sizes, types or parameters contradict each other.
    Source: Ascend C's Conv3DBackpropInput.
    """

    conv: ConvShape
    dtype: DType
    grad_output_format: ActivationFormat
    weight_format: WeightFormat
    output_format: ActivationFormat
    region: tuple[Span, Span] | None = None
    precision: str = "highest"
    deterministic: bool = True

    @classmethod
    def from_request(cls, request: Conv3dBackpropInputRequest) -> Self:
        dtype = shared_dtype(request.tensors())
        grad_format = ACTIVATION_FORMATS[request.grad_output_format]
        weight_format = WEIGHT_FORMATS[request.weight_format]
        grad_shape = grad_format.check_rank("grad_output", request.grad_output.shape)
        weight_shape = weight_format.check_rank("weight", request.weight.shape)
        steps = Steps.of(request, 3)
        groups = positive("groups", request.groups)
        sizes = _weight_sizes(weight_format, weight_shape, request.weight_size)
        out_channels, in_channels_per_group, *kernel = sizes
        divisible("grad_output", out_channels, groups)
        require_shape(
            "weight",
            weight_shape,
            weight_format.shape(dtype, groups, sizes),
            f"({weight_format.order}) from weight_size {tuple_text(sizes)} and groups {groups}",
        )
        batch, output_size = grad_shape[0], grad_format.spatial(grad_shape)
        require_shape(
            "grad_output",
            grad_shape,
            grad_format.shape(dtype, batch, out_channels, output_size),
            f"({grad_format.order}) from the weight's {out_channels} output channels",
        )
        in_channels = in_channels_per_group * groups
        full = ConvShape(
            batch=batch,
            groups=groups,
            in_channels=in_channels,
            out_channels=out_channels,
            input_size=_input_size(request, batch, in_channels, output_size, tuple(kernel), steps),
            kernel_size=tuple(kernel),
            output_size=output_size,
            **steps._asdict(),
        )
        region = _region(request.region, full.input_size)
        problem = cls(
            conv=_narrowed(full, region),
            dtype=dtype,
            grad_output_format=grad_format,
            weight_format=weight_format,
            output_format=ACTIVATION_FORMATS[request.output_format],
            region=region,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
        )
        check_shape("grad_input", problem.outputs["grad_input"].shape)
        return problem

    @property
    def operation(self) -> str:
        return "conv3d_backprop_input"

    @property
    def plain(self) -> ConvBwdData:
        """The problem on NCDHW arrays, which the formats' unpack and pack convert."""
        return ConvBwdData(
            conv=self.conv,
            dtype=self.dtype,
            layout=_PLAIN,
            precision=self.precision,
            deterministic=self.deterministic,
        )

    @property
    def weight_size(self) -> Size:
        """(K, C/G, T, R, S)."""
        conv = self.conv
        return conv.out_channels, conv.in_channels_per_group, *conv.kernel_size

    @property
    def _touching(self) -> ConvShape:
        """``conv`` restricted to the part of grad_output that meets the region."""
        conv = self.conv
        for axis in (0, 1):
            rows = 0, conv.input_size[axis]
            conv = conv.window(axis, rows, conv.outputs_for(axis, rows))
        return conv

    @property
    def flops(self) -> int:
        return (self.conv if self.region is None else self._touching).flops

    @property
    def valid_flops(self) -> int:
        return self.conv.valid_flops

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {
            "grad_output": self._grad_output(self.conv),
            "weight": TensorSpec(
                self.weight_format.shape(self.dtype, self.conv.groups, self.weight_size),
                self.dtype,
            ),
        }

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        conv = self.conv
        shape = self.output_format.shape(self.dtype, conv.batch, conv.in_channels, conv.input_size)
        return {"grad_input": TensorSpec(shape, self.dtype)}

    @property
    def compulsory_bytes(self) -> int:
        """Least memory traffic; of grad_output, only what meets the region is read."""
        if self.region is None:
            return self.memory_bytes
        unread = self._grad_output(self.conv).size_bytes
        return self.memory_bytes - unread + self._grad_output(self._touching).size_bytes

    def _grad_output(self, conv: ConvShape) -> TensorSpec:
        shape = self.grad_output_format.shape(
            self.dtype, conv.batch, conv.out_channels, conv.output_size
        )
        return TensorSpec(shape, self.dtype)

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, then by depth of grad_input with the depth of grad_output that meets it."""
        pieces = []
        for samples, rows in grid(self.conv.batch, self.conv.input_size[0], parts):
            touching = self.conv.outputs_for(0, rows)
            conv = self.conv.window(0, rows, touching).with_batch(samples[1] - samples[0])
            pieces.append(
                Piece(
                    replace(self, conv=conv),
                    {
                        "grad_output": _slices(self.grad_output_format, samples, touching),
                        "weight": whole(len(self.inputs["weight"].shape)),
                    },
                    {"grad_input": _slices(self.output_format, samples, rows)},
                    {"grad_input": "concatenate"},
                )
            )
        return tuple(pieces)


def _slices(format: ActivationFormat, samples: Span, depth: Span) -> Slices:
    cut = [slice(None)] * (format.order.count(",") + 1)
    cut[0] = slice(*samples)
    cut[format.depth_axis] = slice(*depth)
    return tuple(cut)


def _narrowed(conv: ConvShape, region: tuple[Span, Span] | None) -> ConvShape:
    for axis, rows in enumerate(region or ()):
        conv = conv.window(axis, rows, (0, conv.output_size[axis]))
    return conv


def _weight_sizes(format: WeightFormat, shape: Size, stated: Sequence[int] | None) -> Size:
    """Return (K, C/G, T, R, S) as stated, or from the weight's shape."""
    if stated is None:
        if format.self_describing:
            return format.sizes(shape)
        raise InvalidProblem(
            f"weight_size is missing; expected [K, C/groups, D, H, W] with a weight in "
            f"{format.name}, whose shape {tuple_text(shape)} does not imply it"
        )
    if len(stated) != 5:
        raise InvalidProblem(
            f"weight_size is {tuple_text(stated)}; expected 5 values, [K, C/groups, D, H, W]"
        )
    for i, value in enumerate(stated):
        positive(f"weight_size[{i}]", value)
    return check_shape("weight_size", stated)


def _input_size(
    request: Conv3dBackpropInputRequest,
    batch: int,
    channels: int,
    output_size: Size,
    kernel: Size,
    steps: Steps,
) -> Size:
    """Return the stated size after checking it, or the smallest input plus output_padding."""
    extra = read_output_padding(request.output_padding, steps, 3)
    if request.input_size is None:
        return minimal_input_size(output_size, kernel, *steps, extra)
    stated = input_size_of(_PLAIN, request.input_size, batch, 1, channels)
    if any(extra):
        size = minimal_input_size(output_size, kernel, *steps, extra)
        if stated != size:
            raise InvalidProblem(
                f"input_size is {tuple_text(stated)}; expected {tuple_text(size)} from "
                f"grad_output's size {tuple_text(output_size)} and output_padding "
                f"{tuple_text(extra)}"
            )
        return stated
    found = conv_output_size("the input", stated, kernel, *steps)
    if found != output_size:
        raise InvalidProblem(
            f"grad_output has size {tuple_text(output_size)} (D, H, W); expected "
            f"{tuple_text(found)} from input_size {tuple_text(stated)}"
        )
    return stated


def _region(region: Region | None, size: Size) -> tuple[Span, Span] | None:
    if region is None:
        return None
    return _span("region.d", region.d, size[0]), _span("region.h", region.h, size[1])


def _span(name: str, stated: Sequence[int] | None, extent: int) -> Span:
    if stated is None:
        return 0, extent
    start, stop = stated
    if not 0 <= start < stop <= extent:
        raise InvalidProblem(
            f"{name} is [{show(start)}, {show(stop)}]; expected 0 <= start < stop <= {extent}, "
            "the size of grad_input"
        )
    return start, stop
