"""Kernel parameters (``depthwise_weight_args.cuh``) and partial sums of all depthwise wgrad
kernels."""

from __future__ import annotations

from math import prod
from typing import Any

from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import Plane, fill_operands
from convgrad_service.plans.cuda.program import ZEROS, Workspace
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["buffers_of", "elements_of", "fill_weight", "partials_of"]


def elements_of(work: ConvWork, plane: Plane) -> int:
    """Return the number of elements of both inputs."""
    return (prod(plane.input) + prod(plane.output)) * plane.batch * work.groups


def fill_weight(args: Any, work: ConvWork, plane: Plane) -> None:
    """Fill in the kernel parameters except addresses."""
    fill_operands(args, work, plane, work.x, work.y)
    args.channels = work.groups * work.out_channels
    args.x_size[:], args.y_size[:], args.pad[:] = plane.input, plane.output, plane.pad


def partials_of(work: ConvWork, blocks: int, sums: int) -> tuple[Workspace, ...]:
    """Return the workspace for partial sums if several ``blocks`` add to a result."""
    return (Workspace(f"{work.prefix}partials", sums * 4),) if blocks > 1 else ()


def buffers_of(work: ConvWork, partials: tuple[Workspace, ...]) -> dict[str, Operand | str | None]:
    """Return the buffers of the pointers among the kernel parameters."""
    return {
        "x": work.x,
        "y": work.y,
        "w": work.w,
        "accumulate": work.accumulate,
        "partials": partials[0].name if partials else None,
        "arrived": ZEROS,
    }
