"""What poolings share: each (n, c) plane is pooled separately, and indices are flat in a plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from numpy.typing import NDArray

from convgrad.dtypes import INDEX, DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.base import Piece, Problem, Slices, TensorSpec
from convgrad_service.problems.layouts import Layout, activation_shape
from convgrad_service.problems.reading import Activation, input_size_of, read_activation
from convgrad_service.problems.sizes import Size, require_shape
from convgrad_service.problems.slicing import grid
from convgrad_service.problems.windows import WindowAxis

__all__ = [
    "PlaneProblem",
    "WindowProblem",
    "check_one_source",
    "check_plane",
    "index_dtype_of",
    "source_size",
    "ungrouped",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneProblem(Problem):
    """A pooling of N * C planes in ``layout``, split along N, then along C."""

    batch: int
    channels: int
    dtype: DType
    layout: Layout
    deterministic: bool = True

    def _spec(self, size: Size, dtype: DType) -> TensorSpec:
        return TensorSpec(activation_shape(self.layout, self.batch, 1, self.channels, size), dtype)

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        pieces = []
        for samples, channels in grid(self.batch, self.channels, parts):
            cut = {self.layout.axis("N"): slice(*samples), self.layout.axis("C"): slice(*channels)}
            slices: Slices = tuple(cut.get(axis, slice(None)) for axis in range(self.layout.rank))
            problem = replace(
                self, batch=samples[1] - samples[0], channels=channels[1] - channels[0]
            )
            pieces.append(
                Piece(
                    problem,
                    dict.fromkeys(self.inputs, slices),
                    dict.fromkeys(self.outputs, slices),
                    dict.fromkeys(self.outputs, "concatenate"),
                )
            )
        return tuple(pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowProblem(PlaneProblem):
    """A pooling over ``windows`` of each spatial dimension."""

    windows: tuple[WindowAxis, ...]

    @property
    def input_size(self) -> Size:
        return tuple(axis.input for axis in self.windows)

    @property
    def output_size(self) -> Size:
        return tuple(axis.output for axis in self.windows)

    @property
    def flops(self) -> int:
        """One operation for each position of a window."""
        return self.batch * self.channels * prod(axis.taps for axis in self.windows)


def ungrouped(layout: Layout) -> Layout:
    """Return the layout; raise InvalidProblem if it has a dimension of groups."""
    if layout.grouped:
        plain = layout.activation.replace("G", "")
        raise InvalidProblem(f"layout is {layout.name}; expected one without groups, as {plain}")
    return layout


def check_one_source(input: NDArray[Any] | None, indices: NDArray[Any] | None) -> None:
    """Raise InvalidProblem unless a max pooling's gradient has either an input or indices."""
    if (input is None) == (indices is None):
        found = "neither input nor indices is given" if input is None else "both are given"
        raise InvalidProblem(f"{found}; expected either input or indices")


def source_size(
    layout: Layout,
    grad: Activation,
    input: NDArray[Any] | None,
    stated: Sequence[int] | None,
) -> Size:
    """Return the size of a max pooling's input, or the one stated with the indices.

    Raises
    ------
    InvalidProblem
        There is neither, or it contradicts the other tensors.
    """
    size = None
    if stated is not None:
        size = input_size_of(layout, stated, grad.batch, 1, grad.channels)
    if input is None:
        if size is None:
            raise InvalidProblem(
                "there are indices but no input_size; expected it, since indices are flat in the "
                "planes of an input of that size"
            )
        return size
    given = read_activation(layout, "input", input.shape)
    shape = activation_shape(layout, grad.batch, 1, grad.channels, size or given.size)
    source = "grad_output's N and C" if size is None else "grad_output's N and C and input_size"
    require_shape("input", given.shape, shape, f"from {source}")
    return given.size


def index_dtype_of(indices: NDArray[Any]) -> DType:
    """Return the dtype of indices; raise InvalidProblem unless it is int32 or int64."""
    dtype = DType.of(indices.dtype)
    if dtype is None or dtype not in INDEX:
        raise InvalidProblem(
            f"indices has dtype {dtype or indices.dtype}; expected {' or '.join(INDEX)}"
        )
    return dtype


def check_plane(name: str, dtype: DType | None, size: Size, of: str = "the input") -> None:
    """Raise InvalidProblem where int32 cannot count the positions of a plane."""
    if dtype is DType.INT32 and prod(size) > 2**31:
        raise InvalidProblem(
            f"{name} is int32 and a plane of {of} has {prod(size)} elements; expected int64, "
            f"or at most {2**31}"
        )
