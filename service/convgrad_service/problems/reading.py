"""From a request's arrays and parameters to the sizes that every operation needs.

The checks that several operations share stand here once; each operation's own module says which
of them apply and what follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from convgrad.dtypes import FLOATING, DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.formulas import conv_output_size
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout, activation_shape, weight_shape
from convgrad_service.problems.sizes import (
    IntOrSequence,
    Padding,
    Pads,
    Size,
    check_shape,
    pairs_per_dimension,
    per_dimension,
    positive,
    require_shape,
    show,
    size_of_length,
    tuple_text,
)

__all__ = [
    "Activation",
    "Filter",
    "Steps",
    "agreed_groups",
    "check_bias",
    "check_filter_inputs",
    "check_output_size",
    "check_precision",
    "divisible",
    "input_size_of",
    "read_activation",
    "read_filter",
    "read_output_padding",
    "same_batch",
    "same_channels",
    "shared_dtype",
    "wanted_outputs",
]


class Activation(NamedTuple):
    """The sizes of an input or of a gradient of one; ``channels`` over all groups."""

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
        """From a request, or from an object of it whose name is the prefix.

        Raises:
            InvalidProblem: a wrong number of values, or one out of its bounds.
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
    """The floating type that all of `tensors` have.

    Raises:
        InvalidProblem: one is not floating, or two differ.
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
        raise InvalidProblem("there is no floating tensor; expected at least one")
    return first[1]


def read_activation(layout: Layout, name: str, shape: Sequence[int]) -> Activation:
    """The sizes in an activation's shape.

    Raises:
        InvalidProblem: not of the layout's rank, or an extent out of its bounds.
    """
    layout.check_rank(name, shape, layout.activation)
    checked = check_shape(name, shape)
    return Activation(name, checked, *layout.activation_sizes(checked))


def read_filter(layout: Layout, name: str, shape: Sequence[int]) -> Filter:
    """The sizes in a weight's shape.

    Raises:
        InvalidProblem: not of the layout's rank, or an extent out of its bounds.
    """
    layout.check_rank(name, shape, layout.weight)
    checked = check_shape(name, shape)
    return Filter(name, checked, *layout.weight_sizes(checked))


def agreed_groups(
    layout: Layout, stated: int, *tensors: Activation | Filter, prefix: str = ""
) -> int:
    """The groups: stated, or in a grouped layout the tensors' own.

    There ``groups`` may stay at its default of 1, or repeat what the tensors say.

    Raises:
        InvalidProblem: two sources differ, or fewer than one group.
    """
    positive(f"{prefix}groups", stated)
    if not layout.grouped:
        return stated
    for tensor in tensors[1:]:
        if tensor.groups != tensors[0].groups:
            raise InvalidProblem(
                f"{tensor.name} has shape {tuple_text(tensor.shape)}, {tensor.groups} groups; "
                f"expected {tensors[0].groups} (G of {tensors[0].name}) in layout {layout.name}"
            )
    groups = tensors[0].groups
    assert groups is not None  # noqa: S101 - a grouped layout has a G
    if stated not in (1, groups):
        raise InvalidProblem(
            f"{prefix}groups is {show(stated)}; expected {groups}, the G of {tensors[0].name}'s "
            f"shape {tuple_text(tensors[0].shape)} in layout {layout.name}"
        )
    return groups


def divisible(what: str, channels: int, groups: int) -> None:
    """Hold a number of channels to be a multiple of the groups.

    Raises:
        InvalidProblem: it is not.
    """
    if channels % groups:
        raise InvalidProblem(
            f"{what} has {show(channels)} channels; expected a multiple of groups, {show(groups)}"
        )


def same_batch(a: Activation, b: Activation) -> None:
    """Raises InvalidProblem unless both have one N."""
    if a.batch != b.batch:
        raise InvalidProblem(
            f"{a.name} has shape {tuple_text(a.shape)}, a batch of {a.batch}; expected "
            f"{b.batch}, that of {b.name}"
        )


def same_channels(weight: Filter, activation: Activation) -> None:
    """Raises InvalidProblem unless the weight has an output channel for each of the tensor's."""
    if weight.out_channels != activation.channels:
        raise InvalidProblem(
            f"{weight.name} has shape {tuple_text(weight.shape)}, {weight.out_channels} output "
            f"channels; expected {activation.channels}, the channels of {activation.name}"
        )


def check_filter_inputs(layout: Layout, weight: Filter, input: Activation, groups: int) -> None:
    """Hold a weight's input channels against those of the input.

    Raises:
        InvalidProblem: not C/groups of them, or channels that the groups do not divide.
    """
    divisible(input.name, input.channels, groups)
    divisible(f"the output of {weight.name}", weight.out_channels, groups)
    expected = weight_shape(layout, groups, input.channels, weight.out_channels, weight.kernel)
    require_shape(
        weight.name,
        weight.shape,
        expected,
        f"from {input.name}'s {input.channels} channels and groups {groups}",
    )


def input_size_of(
    layout: Layout, stated: Sequence[int], batch: int, groups: int, channels: int
) -> Size:
    """The spatial size in ``input_size``, whose full form is in the layout's own order.

    Raises:
        InvalidProblem: a wrong length, or a full shape that contradicts the other tensors.
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


def check_output_size(layout: Layout, name: str, shape: Sequence[int], conv: ConvShape) -> None:
    """Hold the shape of `name`, an output's gradient, against the formula.

    Raises:
        InvalidProblem: they differ, or the kernel does not fit into the input.
    """
    size = conv_output_size(
        "the input", conv.input_size, conv.kernel_size, conv.stride, conv.padding, conv.dilation
    )
    require_shape(
        name,
        shape,
        activation_shape(layout, conv.batch, conv.groups, conv.out_channels, size),
        f"from input_size {tuple_text(conv.input_size)}, {conv.geometry_text}",
    )


def check_bias(name: str, bias: NDArray[Any] | None, channels: int) -> bool:
    """Whether there is a bias; if so it has one value for each output channel.

    Raises:
        InvalidProblem: another shape.
    """
    if bias is None:
        return False
    require_shape(name, bias.shape, (channels,), "(one value for each output channel)")
    return True


def check_precision(precision: str) -> str:
    """Raises InvalidProblem unless it is ``highest`` or ``high``."""
    if precision not in ("highest", "high"):
        raise InvalidProblem(f"precision is {precision[:32]!r}; expected highest or high")
    return precision


def wanted_outputs(stated: Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """The outputs asked for, in the order in which they are known.

    Raises:
        InvalidProblem: none, one twice, or an unknown one.
    """
    if not stated or len(set(stated)) != len(stated) or not set(stated) <= set(known):
        raise InvalidProblem(
            f"outputs is {tuple_text(stated) if stated else 'empty'}; expected one or more of "
            f"{', '.join(known)}, each once"
        )
    return tuple(name for name in known if name in stated)


def read_output_padding(value: IntOrSequence, steps: Steps, ndim: int) -> Size:
    """output_padding: rows beyond the smallest input, fewer than max(stride, dilation) of them.

    Raises:
        InvalidProblem: a wrong number of values, or one out of its bounds.
    """
    extra = per_dimension("output_padding", value, ndim, minimum=0)
    for i, (more, s, d) in enumerate(zip(extra, steps.stride, steps.dilation, strict=True)):
        if more >= max(s, d):
            raise InvalidProblem(
                f"output_padding is {show(more)} in spatial dimension {i}; expected less than "
                f"{show(max(s, d))}, the larger of stride {show(s)} and dilation {show(d)}"
            )
    return extra
