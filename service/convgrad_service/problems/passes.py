"""Several passes of one convolution: transposed convolutions and second derivatives.

A pass computes one tensor of the convolution (its output y, or the gradient of its input x or
weight w) from the other two; a pass of two terms computes the sum of both products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from numpy.typing import NDArray

from convgrad.contract import ConvRequest
from convgrad.dtypes import DType
from convgrad_service.problems.base import Piece, Slices, TensorSpec
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.geometry import ConvShape, Span
from convgrad_service.problems.grouped_conv_bwd_weight import sum_dtype
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.reading import check_precision, shared_dtype
from convgrad_service.problems.slicing import activation_slices, even_spans, grid, whole

__all__ = ["ConvPasses", "Direction", "Pass", "Side"]

Direction = Literal["fwd", "bwd_data", "bwd_weight", "input_sums"]
Side = Literal["x", "w", "y"]

_READ: Mapping[Direction, tuple[Side, ...]] = {
    "fwd": ("x", "w"),
    "bwd_data": ("y", "w"),
    "bwd_weight": ("x", "y"),
    "input_sums": ("x",),
}
_WRITTEN: Mapping[Direction, Side] = {"fwd": "y", "bwd_data": "x", "bwd_weight": "w"}


@dataclass(frozen=True, slots=True)
class Pass:
    """One output: the sum of its terms and of a bias for each of its channels.

    ``terms`` has the tensors of each product: (x, w) for ``fwd``, (y, w) for ``bwd_data``, (x, y)
    for ``bwd_weight``; ``input_sums`` sums x over everything but the channel. There are at most
    two; without any, the output is the bias, or zero.
    """

    direction: Direction
    output: str
    terms: tuple[tuple[str, ...], ...]
    bias: str | None = None

    @property
    def sides(self) -> dict[str, Side]:
        """The convolution's tensor that each tensor read, other than the bias, represents."""
        read = _READ[self.direction]
        return {name: side for term in self.terms for name, side in zip(term, read, strict=True)}

    @property
    def written(self) -> Side | None:
        """The convolution's tensor that the output represents; None for ``input_sums``."""
        return _WRITTEN.get(self.direction)

    @property
    def is_sum(self) -> bool:
        """Whether the output is a sum over the batch."""
        return self.direction in ("bwd_weight", "input_sums")

    @property
    def divides_input(self) -> bool:
        """Whether pieces divide the rows of x, with the rows of y that meet them, or vice versa."""
        return self.direction in ("bwd_data", "input_sums")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvPasses(ConvProblem):
    """Passes of the convolution ``conv``, one for each output, in the order of the response.

    ``sums_dtype`` is set only in pieces; it is the type of their partial sums over the batch.

    Shapes: those of the convolution's tensors: x (N, C, *in), w (K, C/G, *kernel), y (N, K, *out);
    a bias and its gradient have one value for each channel.
    Dtypes: ``dtype`` stored, sums in float32 (float64 for float64).
    Layout: ``layout``, any of 1D to 3D.
    """

    operation: str
    passes: tuple[Pass, ...]
    sums_dtype: DType | None = None

    @classmethod
    def of(
        cls, request: ConvRequest, layout: Layout, conv: ConvShape, passes: tuple[Pass, ...]
    ) -> Self:
        """Make the problem of a request.

        Raises
        ------
        InvalidProblem
            Tensors have different types, or an output is too large.
        """
        problem = cls(
            conv=conv,
            dtype=shared_dtype(request.tensors()),
            layout=layout,
            precision=check_precision(request.precision),
            deterministic=request.deterministic,
            operation=request.operation,
            passes=passes,
        )
        problem._check_outputs()
        return problem

    @property
    def flops(self) -> int:
        return self._count(self.conv.flops)

    @property
    def valid_flops(self) -> int:
        return self._count(self.conv.valid_flops)

    def _count(self, products: int) -> int:
        additions = self.input_spec.elements
        return sum(
            additions if one.direction == "input_sums" else products * len(one.terms)
            for one in self.passes
        )

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """The tensors that the passes read."""
        specs: dict[str, TensorSpec] = {}
        for one in self.passes:
            specs |= {name: self.spec_of(side) for name, side in one.sides.items()}
            if one.bias is not None:
                specs[one.bias] = self._channels(one.written)
        return specs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        specs = {}
        for one in self.passes:
            side = one.written
            spec = self._channels("x") if side is None else self.spec_of(side)
            if one.is_sum and self.sums_dtype is not None:
                spec = replace(spec, dtype=self.sums_dtype)
            specs[one.output] = spec
        return specs

    def spec_of(self, side: Side) -> TensorSpec:
        """Return the spec of the convolution's input, weight or output."""
        return {"x": self.input_spec, "w": self.weight_spec, "y": self.output_spec}[side]

    def _channels(self, side: Side | None) -> TensorSpec:
        conv = self.conv
        return TensorSpec((conv.out_channels if side == "y" else conv.in_channels,), self.dtype)

    def only(self, wanted: Iterable[str]) -> Self:
        """Return a copy with only these outputs."""
        return replace(self, passes=tuple(one for one in self.passes if one.output in wanted))

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Split by N, where all passes share a piece; further, split each pass separately.

        Their rows differ: rows of one pass's output meet overlapping rows of another's.
        """
        if len(self.passes) > 1 and parts > self.conv.batch:
            return tuple(
                piece for one in self.passes for piece in self.only([one.output]).split(parts)
            )
        if len(self.passes) > 1:
            partial = replace(self, sums_dtype=sum_dtype(self.dtype))
            spans = even_spans(self.conv.batch, parts)
            return tuple(partial._piece(samples, None) for samples in spans)
        (one,) = self.passes
        size = self.conv.input_size if one.divides_input else self.conv.output_size
        cuts = list(grid(self.conv.batch, size[0], parts))
        if len(cuts) == 1:
            return (Piece.whole(self),)
        partial = replace(self, sums_dtype=sum_dtype(self.dtype)) if one.is_sum else self
        return tuple(partial._piece(samples, span) for samples, span in cuts)

    def _piece(self, samples: Span, rows: Span | None) -> Piece:
        """Return the piece of a range of samples and, if there is one pass, of its rows."""
        conv = self.conv
        of_x, of_y = (0, conv.input_size[0]), (0, conv.output_size[0])
        if rows is not None and self.passes[0].divides_input:
            of_x, of_y = rows, conv.outputs_for(0, rows)
        elif rows is not None:
            of_x, of_y = conv.inputs_for(0, rows), rows
        window = conv if rows is None else conv.window(0, of_x, of_y)
        problem = replace(self, conv=window.with_batch(samples[1] - samples[0]))
        slices: dict[Side | None, Slices] = {
            "x": activation_slices(self.layout, samples, of_x),
            "y": activation_slices(self.layout, samples, of_y),
        }
        own: dict[str, Slices] = {}
        for one in self.passes:
            sides = {**one.sides, one.output: one.written}
            own |= {name: slices[side] for name, side in sides.items() if side in slices}
        inputs, outputs = (
            {name: own.get(name, whole(len(spec.shape))) for name, spec in specs.items()}
            for specs in (self.inputs, self.outputs)
        )
        return Piece(
            problem,
            inputs,
            outputs,
            {one.output: "sum" if one.is_sum else "concatenate" for one in self.passes},
        )

    def finish(
        self, name: str, total: NDArray[Any], tensors: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        return total.astype(self.outputs[name].dtype.numpy, copy=False)
