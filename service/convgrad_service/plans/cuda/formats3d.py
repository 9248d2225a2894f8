"""Conversions between Ascend's blocked 3D formats and the plain layouts that kernels use."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from convgrad_service.plans.cuda.program import Workspace, ceil_div
from convgrad_service.plans.cuda.works import (
    Copy,
    CopyAxis,
    Operand,
    activation_operand,
    contiguous_strides,
    weight_operand,
)
from convgrad_service.problems import Conv3dBackpropInput
from convgrad_service.problems.formats3d import N0
from convgrad_service.problems.layouts import LAYOUTS, activation_shape, weight_shape

__all__ = ["convert_formats"]

# Blocked formats are converted to channels last: their innermost dimension is channels too.
_LAST = LAYOUTS["NDHWC"]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plain operands of a conv3d_backprop_input, and the copies before and after it."""

    grad_output: Operand
    weight: Operand
    grad_input: Operand
    before: tuple[Copy, ...]
    after: tuple[Copy, ...]
    workspace: tuple[Workspace, ...]


def convert_formats(problem: Conv3dBackpropInput) -> Conversion:
    """Convert blocked formats in a workspace; plain ones are read and written in place."""
    conv, dtype = problem.conv, problem.dtype
    before: list[Copy] = []
    after: list[Copy] = []
    workspace: list[Workspace] = []

    def plain(buffer: str, shape: tuple[int, ...]) -> str:
        name = f"plain.{buffer}"
        workspace.append(Workspace(name, prod(shape) * dtype.itemsize))
        return name

    def activation(name: str, form: str, channels: int, size: tuple[int, ...]) -> Operand:
        if form in LAYOUTS:
            layout = LAYOUTS[form]
            shape = activation_shape(layout, conv.batch, conv.groups, channels, size)
            return activation_operand(name, dtype, layout, shape, conv.groups)
        shape = activation_shape(_LAST, conv.batch, conv.groups, channels, size)
        buffer = plain(name, shape)
        is_output = name in problem.outputs
        c0 = (problem.outputs if is_output else problem.inputs)[name].shape[-1]
        axes = _activation_axes(conv.batch, channels, size, c0)
        if is_output:
            swapped = tuple(CopyAxis(axis.extent, axis.target, axis.source) for axis in axes)
            after.append(Copy(buffer, name, dtype, swapped, ((2, 5, channels),), pads=True))
        else:
            before.append(Copy(name, buffer, dtype, axes, ((2, 5, channels),)))
        return activation_operand(buffer, dtype, _LAST, shape, conv.groups)

    def weight() -> Operand:
        form = problem.weight_format.name
        layout = LAYOUTS.get(form, _LAST)
        shape = weight_shape(
            layout, conv.groups, conv.in_channels, conv.out_channels, conv.kernel_size
        )
        if form in LAYOUTS:
            return weight_operand("weight", dtype, layout, shape, conv.groups)
        buffer = plain("weight", shape)
        per_group = conv.out_channels_per_group, conv.in_channels_per_group
        c0 = problem.inputs["weight"].shape[-1]
        axes = _fractal_axes(conv.groups, *per_group, conv.kernel_size, c0)
        bounds = ((4, 5, per_group[0]), (2, 6, per_group[1]))
        before.append(Copy("weight", buffer, dtype, axes, bounds))
        return weight_operand(buffer, dtype, layout, shape, conv.groups)

    return Conversion(
        activation(
            "grad_output", problem.grad_output_format.name, conv.out_channels, conv.output_size
        ),
        weight(),
        activation("grad_input", problem.output_format.name, conv.in_channels, conv.input_size),
        tuple(before),
        tuple(after),
        tuple(workspace),
    )


def _activation_axes(
    batch: int, channels: int, size: tuple[int, ...], c0: int
) -> tuple[CopyAxis, ...]:
    """Return the axes of (N, D, C1, H, W, C0), in this order, to (N, D, H, W, C)."""
    depth, height, width = size
    blocked = (batch, depth, ceil_div(channels, c0), height, width, c0)
    n, d, h, w, c = contiguous_strides((batch, depth, height, width, channels))
    targets = (n, d, c * c0, h, w, c)
    return _axes(blocked, targets)


def _fractal_axes(
    groups: int, out_channels: int, in_channels: int, kernel: tuple[int, ...], c0: int
) -> tuple[CopyAxis, ...]:
    """Return the axes of (G, T, C1, R*S, N1, N0, C0), in this order, to (G, K/G, T, R*S, C/G).

    R and S are adjacent in both, so they are one axis.
    """
    t, rs = kernel[0], kernel[1] * kernel[2]
    n1 = ceil_div(out_channels, N0)
    blocked = (groups, t, ceil_div(in_channels, c0), rs, n1, N0, c0)
    group, k, tap_t, tap_rs, c = contiguous_strides((groups, out_channels, t, rs, in_channels))
    targets = (group, tap_t, c * c0, tap_rs, k * N0, k, c)
    return _axes(blocked, targets)


def _axes(extents: tuple[int, ...], targets: tuple[int, ...]) -> tuple[CopyAxis, ...]:
    sources = contiguous_strides(extents)
    return tuple(CopyAxis(*axis) for axis in zip(extents, sources, targets, strict=True))
