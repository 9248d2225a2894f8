"""From a problem to a plan for a GPU: pure functions of the problem and the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from convgrad.errors import UnsupportedProblem
from convgrad_service.plans.cuda.assembly import (
    choose_conv,
    concurrent_plan,
    conv_work,
    sequential_plan,
    work_on,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families, choose, first_of
from convgrad_service.plans.cuda.formats3d import convert_formats
from convgrad_service.plans.cuda.passes import plan_passes
from convgrad_service.plans.cuda.pooling import (
    plan_average,
    plan_max_backward,
    plan_max_forward,
    plan_unpool,
)
from convgrad_service.plans.cuda.program import CudaPlan, Workspace, ceil_div
from convgrad_service.plans.cuda.shared_reads import share_grad_output
from convgrad_service.plans.cuda.sm_partition import partition_multiprocessors
from convgrad_service.plans.cuda.works import (
    ChannelSums,
    ConvWork,
    FusedWork,
    Operand,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems import (
    AdaptiveAvgPoolBwd,
    AdaptiveAvgPoolFwd,
    AdaptiveMaxPoolBwd,
    AdaptiveMaxPoolFwd,
    AvgPoolBwd,
    AvgPoolFwd,
    Conv3dBackpropInput,
    ConvBackward,
    ConvBwdData,
    ConvFwd,
    ConvPasses,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    MaxPoolBwd,
    MaxPoolFwd,
    MaxUnpoolBwd,
    MaxUnpoolFwd,
    Problem,
    TensorSpec,
)
from convgrad_service.problems.layouts import LAYOUTS, activation_shape

__all__ = ["PLANNERS", "plan_for"]

Planner = Callable[[Any, CudaDevice, Families], CudaPlan]

LINE_BYTES = 128
"""Cache line of a GPU. An intermediate's pixels start at whole lines; otherwise the copy engine
reads two lines for one (728 channels: 102 us instead of 84)."""


def plan_for(problem: Problem, device: CudaDevice, families: Families) -> CudaPlan:
    """Return the plan of a whole problem.

    Raises
    ------
    UnsupportedProblem
        No kernel family takes part of its work.
    """
    planner = PLANNERS.get(type(problem))
    if planner is None:
        raise UnsupportedProblem(f"the GPU has no kernel for {problem.operation}")
    return planner(problem, device, families)


def _forward(problem: ConvFwd, device: CudaDevice, families: Families) -> Chosen:
    bias = "bias" if problem.bias else None
    work = conv_work(problem, "fwd", "input", "weight", "output", bias=bias)
    return choose_conv(work, device, families)


def _bwd_data(problem: ConvBwdData, device: CudaDevice, families: Families) -> Chosen:
    names = "grad_input", "weight", "grad_output"
    work = conv_work(problem, "bwd_data", *names, epilogue=problem.epilogue)
    return choose_conv(work, device, families)


def _bwd_weight(
    problem: GroupedConvBwdWeight, device: CudaDevice, families: Families, prefix: str = ""
) -> Iterable[Chosen]:
    work = conv_work(
        problem,
        "bwd_weight",
        "input",
        "grad_weight",
        "grad_output",
        result_dtype=problem.weight_dtype,
        epilogue=problem.epilogue,
        split_k=problem.split_k,
        prefix=prefix,
    )
    if "grad_weight" in problem.wanted:
        yield choose_conv(work, device, families)
    if "grad_bias" in problem.wanted:
        sums = ChannelSums(
            conv=work.conv,
            y=work.y,
            result="grad_bias",
            result_dtype=work.result_dtype,
            prefix="bias.",
        )
        yield choose(families.channel_sums, sums, device)


def _plan_backward(problem: ConvBackward, device: CudaDevice, families: Families) -> CudaPlan:
    """Plan both gradients as concurrent branches, the weight's first.

    On an H200 this is up to 26 % faster than one after the other on the suite's dense layers; with
    the input's gradient first nothing was gained.
    """
    data = next((part for part in problem.parts if isinstance(part, ConvBwdData)), None)
    weight = next((part for part in problem.parts if isinstance(part, GroupedConvBwdWeight)), None)
    chosen: list[Chosen] = []
    if weight is not None:
        chosen += _bwd_weight(weight, device, families, "weight.")
    if data is not None:
        chosen.append(_bwd_data(data, device, families))
    if weight is not None and data is not None and "grad_weight" in weight.wanted:

        def grad_weight(part: CudaDevice, own: Families = families) -> Chosen:
            return next(iter(_bwd_weight(weight, part, own, "weight.")))

        def grad_input(part: CudaDevice, own: Families = families) -> Chosen:
            return _bwd_data(data, part, own)

        both = share_grad_output(grad_weight, grad_input, data, device, families)
        # Blocks of depthwise kernels are small: two kernels' run side by side in any case.
        if both is None and (data.conv.groups == 1 or data.conv.in_channels_per_group > 1):
            whole = chosen[0], chosen[-1]
            both = partition_multiprocessors(whole, grad_weight, grad_input, device)
        if both is not None:
            chosen[0], chosen[-1] = both
    return concurrent_plan([[part] for part in chosen], problem)


def _plan_fused(problem: GroupedConvConvFwd, device: CudaDevice, families: Families) -> CudaPlan:
    """Plan one kernel where a family fuses both convolutions, otherwise two and a workspace."""
    layout, dtype = problem.layout, problem.dtype
    inputs, output = problem.inputs, problem.outputs["output"]
    prefix = "fused."

    def operand(name: str, spec: TensorSpec, groups: int) -> Operand:
        return activation_operand(name, dtype, layout, spec.shape, groups)

    def work(index: int, x: Operand, y: Operand) -> ConvWork:
        conv = (problem.conv0, problem.conv1)[index]
        weight = f"weight{index}"
        w = weight_operand(weight, dtype, layout, inputs[weight].shape, conv.groups)
        return work_on(
            problem,
            "fwd",
            conv,
            x,
            w,
            y,
            bias=f"bias{index}" if (problem.bias0, problem.bias1)[index] else None,
            activation=(problem.activation0, problem.activation1)[index],
            prefix=f"{prefix}{index}.",
            follows=index == 1,
            leads=index == 0,
        )

    intermediate = f"{prefix}intermediate"
    # Channels last, which fast kernels use, and without a dimension for groups, because the two
    # convolutions may have different groups.
    last, conv0 = LAYOUTS[f"N{'DHW'[-layout.ndim :]}C"], problem.conv0
    line, channels = LINE_BYTES // dtype.itemsize, conv0.out_channels
    pitch = channels if channels < line else ceil_div(channels, line) * line
    shape = activation_shape(last, conv0.batch, 1, pitch, conv0.output_size)
    intermediate_bytes = problem.intermediate.size_bytes // channels * pitch

    def view(groups: int) -> Operand:
        whole = activation_operand(intermediate, dtype, last, shape, 1)
        n, _, c, d, h, w = whole.strides
        return replace(whole, strides=(n, channels // groups * c, c, d, h, w))

    first_y, second_x = view(conv0.groups), view(problem.conv1.groups)
    first = work(0, operand("input", inputs["input"], conv0.groups), first_y)
    second = work(1, second_x, operand("output", output, problem.conv1.groups))
    fused = FusedWork(first=first, second=second, intermediate_bytes=intermediate_bytes)
    chosen, reasons = first_of(families.fused, fused, device)
    if chosen is not None:
        return sequential_plan([chosen])
    two = [choose_conv(part, device, families) for part in (first, second)]
    two[0] = replace(two[0], passed_over=(*reasons, *two[0].passed_over))
    return sequential_plan(two, [Workspace(intermediate, intermediate_bytes)])


def _plan_backprop_input(
    problem: Conv3dBackpropInput, device: CudaDevice, families: Families
) -> CudaPlan:
    """Plan a bwd_data on plain layouts, between copies from and to blocked formats."""
    converted = convert_formats(problem)
    operands = {"x": converted.grad_input, "w": converted.weight, "y": converted.grad_output}
    work = work_on(problem, "bwd_data", problem.conv, **operands)
    chosen = [choose(families.copy, copy, device) for copy in converted.before]
    chosen.append(choose_conv(work, device, families))
    chosen += [choose(families.copy, copy, device) for copy in converted.after]
    return sequential_plan(chosen, converted.workspace)


PLANNERS: Mapping[type[Problem], Planner] = {
    ConvBwdData: lambda *given: sequential_plan([_bwd_data(*given)]),
    GroupedConvBwdWeight: lambda *given: sequential_plan(_bwd_weight(*given)),
    MaxPoolBwd: plan_max_backward,
    MaxPoolFwd: plan_max_forward,
    Conv3dBackpropInput: _plan_backprop_input,
    GroupedConvConvFwd: _plan_fused,
    ConvFwd: lambda *given: sequential_plan([_forward(*given)]),
    ConvBackward: _plan_backward,
    ConvPasses: plan_passes,
    AvgPoolFwd: plan_average,
    AvgPoolBwd: plan_average,
    AdaptiveAvgPoolFwd: plan_average,
    AdaptiveAvgPoolBwd: plan_average,
    AdaptiveMaxPoolFwd: plan_max_forward,
    AdaptiveMaxPoolBwd: plan_max_backward,
    MaxUnpoolFwd: plan_unpool,
    MaxUnpoolBwd: plan_unpool,
}
"""The planner of each problem class."""
