"""Choose the CPU engine for a convolution: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from convgrad.dtypes import DType
from convgrad_service.plans.base import Plan
from convgrad_service.plans.cpu_dense import dense_of, gather_tiles, weight_chunks, weight_tiles
from convgrad_service.plans.cpu_dense_parts import (
    PANEL_LIMIT_BYTES,
    SCRATCH_LIMIT_BYTES,
    DensePlan,
    first_plan,
    gather_plan,
    weight_plan,
)
from convgrad_service.plans.cpu_device import CpuDevice, sum_bytes
from convgrad_service.plans.cpu_first import first_chunks, first_steps, first_tiles
from convgrad_service.plans.cpu_worth import (
    direct_steps,
    gather_steps,
    weight_steps,
    worth_tiling,
)
from convgrad_service.problems.geometry import ConvShape

__all__ = ["Choice", "CpuDevice", "CpuPlan", "Direction", "choose"]

CpuPlan = Plan
Direction = Literal["fwd", "bwd_data", "bwd_weight"]
Engine = Literal["first", "grouped", "dense", "direct"]

# Grouped kernels vectorise over pixels or groups, dense kernels over the channels of one group. So
# grouped kernels win if groups have few channels on both sides, or if dense ones would fill at most
# a quarter of a vector (the gradient of a first layer's input). For the weight gradient of a first
# layer, the "first" kernel vectorises over output channels.
GROUPED_CHANNELS = 8
LEAST_FILLED = 4


@dataclass(frozen=True)
class Choice:
    """The engine for one direction of a convolution.

    ``dense`` is set for the engines "first" and "dense". ``passed_over`` lists the rejected engines
    with reasons.
    """

    direction: Direction
    engine: Engine
    level: str
    dense: DensePlan | None
    passed_over: tuple[tuple[str, str], ...]

    @cached_property
    def kernel(self) -> str:
        return f"{self.engine}_{self.direction}/{self.level}"

    @cached_property
    def plan(self) -> CpuPlan:
        if self.dense is None:
            return CpuPlan(self.kernel, 0, 1, self.passed_over)
        return CpuPlan(
            self.kernel, self.dense.workspace_bytes, len(self.dense.parts), self.passed_over
        )


@lru_cache(maxsize=1024)
def choose(
    direction: Direction,
    conv: ConvShape,
    dtype: DType,
    device: CpuDevice,
    without: tuple[tuple[Engine, str], ...] = (),
) -> Choice:
    """Choose the most preferred suitable engine, in the order first, grouped, dense, direct.

    Parameters
    ----------
    without : tuple of (engine, reason)
        Engines to exclude for reasons that do not follow from the sizes.

    Raises
    ------
    ProblemTooLarge
        The engine needs more workspace than the device allows.
    """
    passed_over: list[tuple[str, str]] = []
    excluded = dict(without)
    if direction == "bwd_weight":
        first = _first_plan(conv, dtype, device)
        if first is not None:
            return Choice(direction, "first", device.level, first, ())
    reason = excluded.get("grouped") or _why_not_grouped(direction, conv, dtype, device)
    if reason is None:
        return Choice(direction, "grouped", device.level, None, ())
    passed_over.append(("grouped", reason))
    dense = _dense_plan(direction, conv, dtype, device)
    if dense is None:
        reason = (
            f"one tile needs more than {PANEL_LIMIT_BYTES} bytes for its weights, or more than "
            f"{SCRATCH_LIMIT_BYTES} for its pixels"
        )
    elif not _worth_tiling(direction, conv, dtype, device):
        reason = "most products of its tiles would be with padding"
    else:
        return Choice(direction, "dense", device.level, dense, tuple(passed_over))
    passed_over.append(("dense", reason))
    return Choice(direction, "direct", device.level, None, tuple(passed_over))


def _why_not_grouped(
    direction: Direction, conv: ConvShape, dtype: DType, device: CpuDevice
) -> str | None:
    lanes = device.vector_bytes // sum_bytes(dtype)
    in_channels, out_channels = conv.in_channels_per_group, conv.out_channels_per_group
    in_lanes = out_channels if direction == "fwd" else in_channels
    if in_lanes * LEAST_FILLED <= lanes:
        return None
    if conv.groups == 1:
        return f"one group, whose {in_lanes} channels fill the dense kernels' vectors of {lanes}"
    channels = max(in_channels, out_channels)
    if channels > GROUPED_CHANNELS:
        return f"{channels} channels per group are more than {GROUPED_CHANNELS}"
    return None


def _first_plan(conv: ConvShape, dtype: DType, device: CpuDevice) -> DensePlan | None:
    """Return the plan of the "first" engine, or None. It needs few input channels."""
    dense, size = dense_of(conv), sum_bytes(dtype)
    lanes = device.vector_bytes // size
    if dense.in_channels * LEAST_FILLED > lanes or dense.out_channels < lanes:
        return None
    plan = first_plan(dense, sum_bytes=size, device=device)
    if plan is None:
        return None
    tiles = first_tiles(
        dense,
        chunks=first_chunks(dense, size),
        sum_bytes=size,
        vector_bytes=device.vector_bytes,
        threads=1,
    )
    steps = first_steps(dense, tiles, sum_bytes=size)
    return plan if worth_tiling(steps, direct_steps("bwd_weight", conv)) else None


def _dense_plan(
    direction: Direction, conv: ConvShape, dtype: DType, device: CpuDevice
) -> DensePlan | None:
    dense, size = dense_of(conv), sum_bytes(dtype)
    if direction == "bwd_weight":
        return weight_plan(dense, sum_bytes=size, device=device)
    return gather_plan(dense, backward=direction == "bwd_data", sum_bytes=size, device=device)


def _worth_tiling(direction: Direction, conv: ConvShape, dtype: DType, device: CpuDevice) -> bool:
    dense, size, backward = dense_of(conv), sum_bytes(dtype), direction == "bwd_data"
    # Always planned for one thread, since the engine determines the order of summation.
    if direction == "bwd_weight":
        tiles = weight_tiles(
            dense,
            whole_out_channels=dense.out_channels,
            chunks=weight_chunks(dense, size),
            sum_bytes=size,
            vector_bytes=device.vector_bytes,
            threads=1,
        )
        steps = weight_steps(dense, tiles, sum_bytes=size)
    else:
        tiles = gather_tiles(
            dense,
            backward=backward,
            sum_bytes=size,
            vector_bytes=device.vector_bytes,
            threads=1,
        )
        steps = gather_steps(
            dense, tiles, backward=backward, sum_bytes=size, vector_bytes=device.vector_bytes
        )
    return worth_tiling(steps, direct_steps(direction, conv))
