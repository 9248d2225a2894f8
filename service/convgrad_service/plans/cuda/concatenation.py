"""Copies that concatenate the operands of two products: see `problems.concatenation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from convgrad_service.plans.cuda.program import Workspace
from convgrad_service.plans.cuda.works import Copy, CopyAxis, Operand, contiguous_strides
from convgrad_service.problems.concatenation import MAX_DIMENSIONS, concatenate
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.sizes import size3

__all__ = ["concatenate_operands"]

# Canonical axes, of activations (N, G, C, D, H, W) and weights (G, K, C, T, R, S).
ACTIVATION_LAST, ACTIVATION_FIRST = (0, 3, 4, 5, 1, 2), (0, 1, 2, 3, 4, 5)
WEIGHT_LAST, WEIGHT_FIRST = (0, 1, 3, 4, 5, 2), (0, 1, 2, 3, 4, 5)
PRODUCTS = 2


@dataclass(frozen=True, slots=True)
class ConcatenatedOperands:
    """The larger convolution, its two operands, and the copies that fill them."""

    conv: ConvShape
    activation: Operand
    weight: Operand
    copies: tuple[Copy, ...]
    workspace: tuple[Workspace, ...]


def concatenate_operands(
    conv: ConvShape,
    direction: Literal["fwd", "bwd_data"],
    activations: Sequence[Operand],
    weights: Sequence[Operand],
    prefix: str,
) -> ConcatenatedOperands:
    """Concatenate two products, each of an activation (x, or y backward) and a weight.

    Operands concatenated along channels become channels last, which fast kernels read.
    """
    found = concatenate(conv, direction)
    forward = direction == "fwd"
    size = conv.input_size if forward else conv.output_size
    channels = conv.in_channels_per_group, conv.out_channels_per_group
    last = activations[0].channels_last or not found.by_taps
    # The additional spatial dimension is the one before the convolution's own.
    tap = 2 + MAX_DIMENSIONS - conv.ndim
    activation, activation_copies = _concatenated(
        activations,
        (conv.batch, conv.groups, channels[not forward], *size3(size)),
        ACTIVATION_LAST if last else ACTIVATION_FIRST,
        tap if found.by_taps else 2,
        f"{prefix}joined_activation",
    )
    weight, weight_copies = _concatenated(
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
    copies = (*activation_copies, *weight_copies)
    return ConcatenatedOperands(found.conv, activation, weight, copies, workspace)


def _concatenated(
    sources: Sequence[Operand],
    extents: tuple[int, ...],
    order: tuple[int, ...],
    axis: int,
    name: str,
) -> tuple[Operand, list[Copy]]:
    """Return the concatenation of the sources along an axis, and the copies that fill it.

    ``extents`` are those of one source; ``order`` lists the axes as they lie in memory.
    """
    shape = [extents[each] * (len(sources) if each == axis else 1) for each in order]
    strides = [0] * 6
    for each, stride in zip(order, contiguous_strides(tuple(shape)), strict=True):
        strides[each] = stride
    n, g, c, d, h, w = strides
    target = Operand(name, sources[0].dtype, (n, g, c, d, h, w))
    copies = [
        Copy(
            source.buffer,
            name,
            source.dtype,
            tuple(CopyAxis(extents[a], source.strides[a], strides[a]) for a in order),
            target_start=index * extents[axis] * strides[axis],
            follows=False,
        )
        for index, source in enumerate(sources)
    ]
    return target, copies
