"""Checks that a request's tensors and parameters are consistent, shared by several operations."""

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
    InconsistentSizes,
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
    """Return the number of groups: as stated, or in a grouped layout that of the tensors.

    In a grouped layout ``stated`` may be its default of 1.

    Raises
    ------
    InvalidProblem
        Tensors or ``stated`` differ, or there is less than one group.
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
    """Raise InvalidProblem unless the channels are a multiple of the groups."""
    if channels % groups:
        raise InconsistentSizes(
            f"{what} has {show(channels)} channels; expected a multiple of groups, {show(groups)}"
        )


def same_batch(a: Activation, b: Activation) -> None:
    """Raise InvalidProblem unless both have the same N."""
    if a.batch != b.batch:
        raise InconsistentSizes(
            f"{a.name} has shape {tuple_text(a.shape)}, a batch of {a.batch}; expected "
            f"{b.batch}, that of {b.name}"
        )


def same_channels(weight: Filter, activation: Activation) -> None:
    """Raise InvalidProblem unless the weight has as many output channels as the activation has."""
    if weight.out_channels != activation.channels:
        raise InconsistentSizes(
            f"{weight.name} has shape {tuple_text(weight.shape)}, {weight.out_channels} output "
            f"channels; expected {activation.channels}, the channels of {activation.name}"
        )


def check_filter_inputs(layout: Layout, weight: Filter, input: Activation, groups: int) -> None:
    """Check a weight's input channels.

    Raises
    ------
    InvalidProblem
        There are not C/groups of them, or channels are not a multiple of the groups.
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


def check_output_size(layout: Layout, name: str, shape: Sequence[int], conv: ConvShape) -> None:
    """Check the shape of ``name``, the gradient of a convolution's output.

    Raises
    ------
    InvalidProblem
        It is not the output's shape, or the kernel does not fit into the input.
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
    """Return whether there is a bias.

    Raises
    ------
    InvalidProblem
        It does not have one value for each output channel.
    """
    if bias is None:
        return False
    require_shape(name, bias.shape, (channels,), "(one value for each output channel)")
    return True
