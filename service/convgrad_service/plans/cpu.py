"""Choose the CPU engine for a convolution: pure functions of sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from convgrad.dtypes import DType
from convgrad_service.plans.base import Plan
from convgrad_service.plans.cpu_dense import dense_of
from convgrad_service.plans.cpu_dense_parts import (
    PANEL_LIMIT_BYTES,
    SCRATCH_LIMIT_BYTES,
    DensePlan,
    first_plan,
    gather_plan,
    weight_plan,
)
from convgrad_service.plans.cpu_device import CpuDevice, sum_bytes
from convgrad_service.plans.cpu_first import first_steps
from convgrad_service.plans.cpu_times import (
    correlation_ns,
    first_ns,
    gather_ns,
    grouped_weight_ns,
    stored_as_planes,
    weight_ns,
)
from convgrad_service.plans.cpu_worth import (
    direct_steps,
    gather_steps,
    weight_steps,
    worth_tiling,
)
from convgrad_service.plans.planar import bwd_data_plan, bwd_weight_plan, forward_plan
from convgrad_service.problems.geometry import ConvShape

__all__ = ["Choice", "CpuDevice", "Direction", "choose"]

Direction = Literal["fwd", "bwd_data", "bwd_weight"]
Engine = Literal["first", "grouped", "dense", "direct"]
ENGINES: tuple[Engine, ...] = ("first", "grouped", "dense", "direct")
PLANNED = {"fwd": forward_plan, "bwd_data": bwd_data_plan, "bwd_weight": bwd_weight_plan}

# The vectors of the grouped kernels are positions or, in depthwise layers, groups; those of the
# dense kernels are channels of a group: of the result, in a weight gradient of the input or, in
# "first", of the output. "dense" is the fastest where both sides have more channels than the first
# of these limits, unless planes are multiplied in place; "first" is no faster where the input has
# more vectors than the second.
GROUPED_CHANNELS = 32
FIRST_VECTORS = 2
# The batch of `_shared_by_pieces`, and the length of a signal there.
TYPICAL_BATCH, TYPICAL_LENGTH = 4, 1024


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
    def plan(self) -> Plan:
        if self.dense is None:
            return Plan(self.kernel, 0, 1, self.passed_over)
        return Plan(
            self.kernel, self.dense.workspace_bytes, len(self.dense.parts), self.passed_over
        )


@lru_cache(maxsize=1024)
def choose(
    direction: Direction,
    conv: ConvShape,
    dtype: DType,
    device: CpuDevice,
    last: bool = False,
    without: tuple[tuple[Engine, str], ...] = (),
) -> Choice:
    """Choose the engine with the least estimated time, or "direct" if none is suitable.

    Parameters
    ----------
    last : bool
        Whether the activations' channels are contiguous and their columns are not.
    without : tuple of (engine, reason)
        Engines to exclude for reasons that do not follow from the sizes.

    Raises
    ------
    ProblemTooLarge
        The engine needs more workspace than the device allows.
    """
    timed = conv if direction == "bwd_weight" else _shared_by_pieces(conv)
    dense, lanes = dense_of(timed), device.vector_bytes // sum_bytes(dtype)
    times: dict[Engine, float] = {}
    plans: dict[Engine, DensePlan | None] = {"grouped": None}
    reasons: dict[Engine, str] = dict(without)
    if "grouped" not in reasons:
        grouped = _grouped_ns(direction, conv, timed, dtype, lanes, last=last)
        if isinstance(grouped, str):
            reasons["grouped"] = grouped
        else:
            times["grouped"] = grouped
    if times.get("grouped") != 0:
        plan = plans["dense"] = _dense_plan(direction, conv, dtype, device)
        if plan is None:
            reasons["dense"] = (
                f"one tile needs more than {PANEL_LIMIT_BYTES} bytes for its weights, or more than "
                f"{SCRATCH_LIMIT_BYTES} for its pixels"
            )
        elif not _worth_tiling(direction, conv, plan, dtype, device):
            reasons["dense"] = "most products of its tiles would be with padding"
        elif direction == "bwd_weight":
            times["dense"] = weight_ns(dense, lanes, last=last)
        else:
            times["dense"] = gather_ns(dense, lanes, backward=direction == "bwd_data", last=last)
        few = dense.in_channels <= FIRST_VECTORS * lanes
        if direction == "bwd_weight" and few and "dense" in times:
            plans["first"] = _first_plan(conv, dtype, device)
            if plans["first"] is not None:
                times["first"] = first_ns(dense, lanes, last=last)
    engine: Engine = min(times, key=lambda name: times[name], default="direct")
    for name, time_ns in times.items():
        if name != engine:
            reasons[name] = f"its estimated time is {time_ns / times[engine]:.2f} times as long"
    passed_over = tuple((name, reasons[name]) for name in ENGINES if name in reasons)
    return Choice(direction, engine, device.level, plans.get(engine), passed_over)


def _shared_by_pieces(conv: ConvShape) -> ConvShape:
    """Return a layer of which a piece of the layer has the same.

    `Problem.split` cuts a layer along N and its outermost spatial dimension, and pieces have the
    bits of the whole only if the same engine computes them. So the batch, and the extent and the
    padding of that dimension, are typical ones instead.
    """
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1)
    extent = max(conv.input_size[-1] if conv.ndim > 1 else TYPICAL_LENGTH, reach + 1)
    outputs = (extent + reach // 2 * 2 - reach - 1) // conv.stride[0] + 1
    padding = reach // 2, (outputs - 1) * conv.stride[0] + reach + 1 - extent - reach // 2
    return replace(
        conv,
        batch=TYPICAL_BATCH,
        input_size=(extent, *conv.input_size[1:]),
        output_size=(outputs, *conv.output_size[1:]),
        padding=(padding, *conv.padding[1:]),
    )


def _grouped_ns(
    direction: Direction, conv: ConvShape, timed: ConvShape, dtype: DType, lanes: int, *, last: bool
) -> float | str:
    """Return the estimated time of ``timed``, 0 in depthwise layers, or why the grouped engine is
    unsuitable."""
    dense = dense_of(timed)
    channels = dense.in_channels, dense.out_channels
    many = min(channels) > GROUPED_CHANNELS
    planes = dense.taps == 1 and not last and dtype.itemsize == sum_bytes(dtype)
    if many and not planes:
        return f"{min(channels)} channels per group are more than {GROUPED_CHANNELS}"
    unsuitable = "its padded planes would be too large, or mostly padding"
    plan = PLANNED[direction](conv, sum_bytes(dtype), lanes, last)
    if plan is None:
        return unsuitable
    if channels == (1, 1) and conv.groups > 1:
        return 0.0
    if timed is not conv:
        plan = PLANNED[direction](timed, sum_bytes(dtype), lanes, last)
        if plan is None:
            return unsuitable
    in_place = planes and stored_as_planes(plan)
    if many and not in_place:
        return f"{min(channels)} channels per group are more than {GROUPED_CHANNELS}"
    if direction == "bwd_weight":
        return grouped_weight_ns(dense, plan, lanes, last=last, in_place=in_place)
    backward = direction == "bwd_data"
    return correlation_ns(dense, plan, lanes, backward=backward, last=last, in_place=in_place)


def _first_plan(conv: ConvShape, dtype: DType, device: CpuDevice) -> DensePlan | None:
    """Return the plan of the "first" engine; None if its tiles would be too large."""
    dense, size = dense_of(conv), sum_bytes(dtype)
    plan = first_plan(dense, sum_bytes=size, device=device)
    if plan is None:
        return None
    # Judged by the tiles for one thread, since the engine determines the order of summation.
    steps = first_steps(dense, plan.alone, sum_bytes=size)
    return plan if worth_tiling(steps, direct_steps("bwd_weight", conv)) else None


def _dense_plan(
    direction: Direction, conv: ConvShape, dtype: DType, device: CpuDevice
) -> DensePlan | None:
    dense, size = dense_of(conv), sum_bytes(dtype)
    if direction == "bwd_weight":
        return weight_plan(dense, sum_bytes=size, device=device)
    return gather_plan(dense, backward=direction == "bwd_data", sum_bytes=size, device=device)


def _worth_tiling(
    direction: Direction, conv: ConvShape, plan: DensePlan, dtype: DType, device: CpuDevice
) -> bool:
    dense, size, backward = dense_of(conv), sum_bytes(dtype), direction == "bwd_data"
    if direction == "bwd_weight":
        steps = weight_steps(dense, plan.alone, sum_bytes=size)
    else:
        sizes = {"sum_bytes": size, "vector_bytes": device.vector_bytes}
        steps = gather_steps(dense, plan.alone, backward=backward, **sizes)
    return worth_tiling(steps, direct_steps(direction, conv))
