"""Whether a request's tensors and parameters agree with one another.

The checks that several operations share stand here once; each operation's own module says which
of them apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.problems.formulas import conv_output_size
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import Layout, activation_shape, weight_shape
from convgrad_service.problems.reading import Activation, Filter
from convgrad_service.problems.sizes import (
    positive,
    require_shape,
    show,
    tuple_text,
)

__all__ = [
    "agreed_groups",
    "check_bias",
    "check_filter_inputs",
    "check_output_size",
    "divisible",
    "same_batch",
    "same_channels",
]


def agreed_groups(
    layout: Layout, stated: int, *tensors: Activation | Filter, prefix: str = ""
) -> int:
    """The groups: stated, or in a grouped layout the tensors' own.

    There ``groups`` may stay at its default of 1, or repeat what the tensors say.

    Raises
    ------
    InvalidProblem
        Two sources differ, or fewer than one group.
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

    Raises
    ------
    InvalidProblem
        It is not.
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

    Raises
    ------
    InvalidProblem
        Not C/groups of them, or channels that the groups do not divide.
    """
    divisible(input.name, input.channels, groups)
    divisible(f"the output of {weight.name}", weight.out_channels, groups)
    expected = weight_shape(layout, groups, input.channels, weight.out_channels, weight.kernel)
    # PyTorch keeps its weights in KCRS whatever the memory format.
    order = (
        "" if layout.weight.startswith("KC") else f"; in {layout.name} a weight is {layout.weight}"
    )
    require_shape(
        weight.name,
        weight.shape,
        expected,
        f"from {input.name}'s {input.channels} channels and groups {groups}{order}",
    )


def check_output_size(layout: Layout, name: str, shape: Sequence[int], conv: ConvShape) -> None:
    """Hold the shape of `name`, an output's gradient, against the formula.

    Raises
    ------
    InvalidProblem
        They differ, or the kernel does not fit into the input.
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

    Raises
    ------
    InvalidProblem
        Another shape.
    """
    if bias is None:
        return False
    require_shape(name, bias.shape, (channels,), "(one value for each output channel)")
    return True
