"""Copies that put the operands of two products side by side: see `problems.joined`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from convgrad_service.plans.cuda.program import Workspace
from convgrad_service.plans.cuda.works import (
    Copy,
    CopyAxis,
    Operand,
    contiguous_strides,
    size3,
)
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.joined import MOST_DIMENSIONS, joined

__all__ = ["JoinedPlan", "plan_joined"]

# Canonical axes, of activations (N, G, C, D, H, W) and weights (G, K, C, T, R, S).
ACTIVATION_LAST, ACTIVATION_FIRST = (0, 3, 4, 5, 1, 2), (0, 1, 2, 3, 4, 5)
WEIGHT_LAST, WEIGHT_FIRST = (0, 1, 3, 4, 5, 2), (0, 1, 2, 3, 4, 5)
PRODUCTS = 2


@dataclass(frozen=True, slots=True)
class JoinedPlan:
    """The larger convolution, its two operands, and what makes them."""

    conv: ConvShape
    activation: Operand
    weight: Operand
    copies: tuple[Copy, ...]
    workspace: tuple[Workspace, ...]


def plan_joined(
    conv: ConvShape,
    direction: Literal["fwd", "bwd_data"],
    activations: Sequence[Operand],
    weights: Sequence[Operand],
    prefix: str,
) -> JoinedPlan:
    """Of two products, each of an activation (x, or y backward) and a weight.

    Joined by channels, both become channels last, as the kernels want them.
    """
    found = joined(conv, direction)
    forward = direction == "fwd"
    size = conv.input_size if forward else conv.output_size
    channels = conv.in_channels_per_group, conv.out_channels_per_group
    last = activations[0].channels_last or not found.by_taps
    # A tap's dimension is the one before the convolution's own.
    tap = 2 + MOST_DIMENSIONS - conv.ndim
    activation, of_activation = _side_by_side(
        activations,
        (conv.batch, conv.groups, channels[not forward], *size3(size)),
        ACTIVATION_LAST if last else ACTIVATION_FIRST,
        tap if found.by_taps else 2,
        f"{prefix}joined_activation",
    )
    weight, of_weight = _side_by_side(
        weights[::-1] if found.reversed_taps else weights,
        (conv.groups, channels[1], channels[0], *size3(conv.kernel_size)),
        WEIGHT_LAST if last else WEIGHT_FIRST,
        tap if found.by_taps else 2 if forward else 1,
        f"{prefix}joined_weight",
    )
    sizes = (
        (one, prod(extents) * PRODUCTS * one.dtype.itemsize)
        for one, extents in (
            (activation, (conv.batch, conv.groups, channels[not forward], *size)),
            (weight, (conv.groups, *channels, *conv.kernel_size)),
        )
    )
    workspace = tuple(Workspace(one.buffer, size_bytes) for one, size_bytes in sizes)
    return JoinedPlan(found.conv, activation, weight, (*of_activation, *of_weight), workspace)


def _side_by_side(
    sources: Sequence[Operand],
    extents: tuple[int, ...],
    order: tuple[int, ...],
    along: int,
    name: str,
) -> tuple[Operand, list[Copy]]:
    """One operand that holds all of the sources, one after another ``along`` an axis.

    ``order`` is that of the axes in memory.
    """
    shape = [extents[axis] * (len(sources) if axis == along else 1) for axis in order]
    strides = [0] * 6
    for axis, stride in zip(order, contiguous_strides(tuple(shape)), strict=True):
        strides[axis] = stride
    n, g, c, d, h, w = strides
    target = Operand(name, sources[0].dtype, (n, g, c, d, h, w))
    copies = [
        Copy(
            source.buffer,
            name,
            source.dtype,
            tuple(CopyAxis(extents[a], source.strides[a], strides[a]) for a in order),
            target_start=place * extents[along] * strides[along],
            follows=False,
        )
        for place, source in enumerate(sources)
    ]
    return target, copies
