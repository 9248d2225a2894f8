"""Parsing single arrays and parameters of requests; `consistency` compares several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from convgrad.dtypes import FLOATING, DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.layouts import Layout, activation_shape
from convgrad_service.problems.sizes import (
    IntOrSequence,
    Padding,
    Pads,
    Size,
    check_shape,
    pairs_per_dimension,
    per_dimension,
    show,
    size_of_length,
    tuple_text,
)

__all__ = [
    "Activation",
    "Filter",
    "Steps",
    "check_precision",
    "input_size_of",
    "read_activation",
    "read_filter",
    "read_output_padding",
    "shared_dtype",
    "wanted_outputs",
]


class Activation(NamedTuple):
    """The sizes of an activation or of its gradient; ``channels`` over all groups."""

    name: str
    shape: Size
    batch: int
    groups: int | None
    channels: int
    size: Size


class Filter(NamedTuple):
    """The sizes of a weight; ``out_channels`` over all groups, ``in_channels`` of one group."""

    name: str
    shape: Size
    groups: int | None
    out_channels: int
    in_channels: int
    kernel: Size


class _HasSteps(Protocol):
    @property
    def stride(self) -> Any: ...
    @property
    def padding(self) -> Any: ...
    @property
    def dilation(self) -> Any: ...


class Steps(NamedTuple):
    """Stride, padding and dilation for each spatial dimension."""

    stride: Size
    padding: Pads
    dilation: Size

    @classmethod
    def of(cls, source: _HasSteps, ndim: int, prefix: str = "") -> Steps:
        """Parse the parameters of a request, or of its member whose name is the prefix.

        Raises
        ------
        InvalidProblem
            The number of values is wrong, or one is out of bounds.
        """
        return cls.checked(source.stride, source.padding, source.dilation, ndim, prefix)

    @classmethod
    def checked(
        cls,
        stride: IntOrSequence,
        padding: Padding,
        dilation: IntOrSequence,
        ndim: int,
        prefix: str = "",
    ) -> Steps:
        return cls(
            per_dimension(f"{prefix}stride", stride, ndim),
            pairs_per_dimension(f"{prefix}padding", padding, ndim),
            per_dimension(f"{prefix}dilation", dilation, ndim),
        )


def shared_dtype(tensors: Mapping[str, NDArray[Any]]) -> DType:
    """Return the floating type of all tensors.

    Raises
    ------
    InvalidProblem
        A tensor is not floating, or two types differ.
    """
    first: tuple[str, DType] | None = None
    for name, array in tensors.items():
        dtype = DType.of(array.dtype)
        if dtype is None or not dtype.is_floating:
            raise InvalidProblem(
                f"{name} has dtype {dtype or array.dtype}; expected one of {', '.join(FLOATING)}"
            )
        if first is None:
            first = name, dtype
        elif dtype != first[1]:
            raise InvalidProblem(
                f"{name} has dtype {dtype} and {first[0]} has {first[1]}; expected one dtype for "
                "all floating tensors of a request"
            )
    if first is None:
        raise InvalidProblem("there is no floating-point tensor; expected at least one")
    return first[1]


def read_activation(layout: Layout, name: str, shape: Sequence[int]) -> Activation:
    """Parse the shape of an activation.

    Raises
    ------
    InvalidProblem
        It does not have the layout's rank, or an extent is out of bounds.
    """
    layout.check_rank(name, shape, layout.activation)
    checked = check_shape(name, shape)
    return Activation(name, checked, *layout.activation_sizes(checked))


def read_filter(layout: Layout, name: str, shape: Sequence[int]) -> Filter:
    """Parse the shape of a weight.

    Raises
    ------
    InvalidProblem
        It does not have the layout's rank, or an extent is out of bounds.
    """
    layout.check_rank(name, shape, layout.weight)
    checked = check_shape(name, shape)
    return Filter(name, checked, *layout.weight_sizes(checked))


def input_size_of(
    layout: Layout, stated: Sequence[int], batch: int, groups: int, channels: int
) -> Size:
    """Return the spatial size in ``input_size``, which may be a full shape in the layout.

    Raises
    ------
    InvalidProblem
        Its length is wrong, or the full shape contradicts the other tensors.
    """
    order = ", ".join(layout.activation)
    if not size_of_length("input_size", stated, layout.ndim, layout.rank, order):
        return tuple(stated)
    size = layout.activation_sizes(stated)[3]
    expected = activation_shape(layout, batch, groups, channels, size)
    if tuple(stated) != expected:
        raise InvalidProblem(
            f"input_size is {tuple_text(stated)}; expected {tuple_text(expected)} ({order}) from "
            "the other tensors"
        )
    return size


def check_precision(precision: str) -> str:
    """Return the precision; raise InvalidProblem unless it is ``highest`` or ``high``."""
    if precision not in ("highest", "high"):
        raise InvalidProblem(f"precision is {precision[:32]!r}; expected highest or high")
    return precision


def wanted_outputs(stated: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the requested outputs in the order of ``known``.

    Raises
    ------
    InvalidProblem
        There is none, one occurs twice, or one is unknown.
    """
    if not stated or len(set(stated)) != len(stated) or not set(stated) <= set(known):
        raise InvalidProblem(
            f"outputs is {tuple_text(stated) if stated else 'empty'}; expected one or more of "
            f"{', '.join(known)}, each once"
        )
    return tuple(name for name in known if name in stated)


def read_output_padding(value: IntOrSequence, steps: Steps, ndim: int) -> Size:
    """Parse output_padding: rows beyond the smallest input, less than max(stride, dilation).

    Raises
    ------
    InvalidProblem
        The number of values is wrong, or one is out of bounds.
    """
    extra = per_dimension("output_padding", value, ndim, minimum=0)
    for i, (more, s, d) in enumerate(zip(extra, steps.stride, steps.dilation, strict=True)):
        if more >= max(s, d):
            raise InvalidProblem(
                f"output_padding is {show(more)} in spatial dimension {i}; expected less than "
                f"{show(max(s, d))}, the larger of stride {show(s)} and dilation {show(d)}"
            )
    return extra
