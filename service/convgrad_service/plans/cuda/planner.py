"""From a problem to what runs on a GPU: pure functions of the problem and the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from convgrad.errors import UnsupportedProblem
from convgrad_service.plans.cuda.branches import shared_out
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families, choose
from convgrad_service.plans.cuda.formats import plan_formats
from convgrad_service.plans.cuda.parts import (
    choose_conv,
    conv_work,
    put_together,
    side_by_side,
)
from convgrad_service.plans.cuda.passes import plan_passes
from convgrad_service.plans.cuda.program import CudaPlan, Workspace, ceil_div
from convgrad_service.plans.cuda.works import (
    ChannelSums,
    ConvWork,
    FusedWork,
    Operand,
    PoolWork,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems import (
    Conv3dBackpropInput,
    ConvBackward,
    ConvBwdData,
    ConvFwd,
    ConvPasses,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    MaxPoolBwd,
    MaxPoolFwd,
    Problem,
    TensorSpec,
)
from convgrad_service.problems.layouts import LAYOUTS, activation_shape

__all__ = ["PLANNERS", "plan_for"]

Planner = Callable[[Any, CudaDevice, Families], CudaPlan]

LINE_BYTES = 128
"""Of a GPU's caches: an intermediate's pixels start at whole lines, or the copy engine reads two
for one (728 channels: 102 us became 84)."""


def plan_for(problem: Problem, device: CudaDevice, families: Families) -> CudaPlan:
    """The launches that compute a problem, whole.

    Raises:
        UnsupportedProblem: no kernel does.
    """
    planner = PLANNERS.get(type(problem))
    if planner is None:
        raise UnsupportedProblem(f"the GPU has no kernel for {problem.operation}")
    return planner(problem, device, families)


def _plan_bwd_data(problem: ConvBwdData, device: CudaDevice, families: Families) -> CudaPlan:
    return put_together([_bwd_data(problem, device, families)])


def _bwd_data(problem: ConvBwdData, device: CudaDevice, families: Families) -> Chosen:
    epilogue = problem.epilogue
    accumulate = None
    if epilogue.accumulate:
        spec = problem.input_spec
        accumulate = activation_operand(
            "accumulate", problem.dtype, problem.layout, spec.shape, problem.conv.groups
        )
    work = conv_work(
        problem,
        "bwd_data",
        "grad_input",
        "weight",
        "grad_output",
        accumulate=accumulate,
        alpha=epilogue.alpha,
        beta=epilogue.beta if epilogue.accumulate else 0.0,
    )
    return choose_conv(work, device, families)


def _plan_fwd(problem: ConvFwd, device: CudaDevice, families: Families) -> CudaPlan:
    bias = "bias" if problem.bias else None
    work = conv_work(problem, "fwd", "input", "weight", "output", bias=bias)
    return put_together([choose_conv(work, device, families)])


def _plan_bwd_weight(
    problem: GroupedConvBwdWeight, device: CudaDevice, families: Families
) -> CudaPlan:
    return put_together(_bwd_weight(problem, device, families))


def _bwd_weight(
    problem: GroupedConvBwdWeight, device: CudaDevice, families: Families, prefix: str = ""
) -> Iterable[Chosen]:
    epilogue, conv, dtype = problem.epilogue, problem.conv, problem.weight_dtype
    if "grad_weight" in problem.wanted:
        accumulate = None
        if epilogue.accumulate:
            shape = problem.weight_spec.shape
            accumulate = weight_operand("accumulate", dtype, problem.layout, shape, conv.groups)
        work = conv_work(
            problem,
            "bwd_weight",
            "input",
            "grad_weight",
            "grad_output",
            result_dtype=dtype,
            accumulate=accumulate,
            alpha=epilogue.alpha,
            beta=epilogue.beta if epilogue.accumulate else 0.0,
            split_k=problem.split_k,
            prefix=prefix,
        )
        yield choose_conv(work, device, families)
    if "grad_bias" in problem.wanted:
        y = activation_operand(
            "grad_output", problem.dtype, problem.layout, problem.output_spec.shape, conv.groups
        )
        sums = ChannelSums(conv=conv, y=y, result="grad_bias", result_dtype=dtype, prefix="bias.")
        yield choose(families.channel_sums, sums, device)


def _plan_backward(problem: ConvBackward, device: CudaDevice, families: Families) -> CudaPlan:
    """Both gradients side by side, the weight's first: on an H200 up to 26 % faster than one after
    the other on the suite's dense layers, while the other way round gained nothing."""
    data = next((part for part in problem.parts if isinstance(part, ConvBwdData)), None)
    weight = next((part for part in problem.parts if isinstance(part, GroupedConvBwdWeight)), None)
    chosen: list[Chosen] = []
    if weight is not None:
        chosen += _bwd_weight(weight, device, families, "weight.")
    if data is not None:
        chosen.append(_bwd_data(data, device, families))
    if weight is not None and data is not None and "grad_weight" in weight.wanted:
        asked = replace(weight, wanted=("grad_weight",))
        chosen[0], chosen[-1] = shared_out(
            lambda share: next(iter(_bwd_weight(asked, share, families, "weight."))),
            lambda share: _bwd_data(data, share, families),
            device,
        )
    return side_by_side([[part] for part in chosen], problem)


def _plan_fused(problem: GroupedConvConvFwd, device: CudaDevice, families: Families) -> CudaPlan:
    """One kernel where a family fuses them, else two around a workspace."""
    between, layout, dtype = problem.intermediate, problem.layout, problem.dtype
    inputs, output = problem.inputs, problem.outputs["output"]
    prefix = "fused."

    def operand(name: str, spec: TensorSpec, groups: int) -> Operand:
        return activation_operand(name, dtype, layout, spec.shape, groups)

    def work(index: int, x: Operand, y: Operand) -> ConvWork:
        conv = (problem.conv0, problem.conv1)[index]
        weight = f"weight{index}"
        return ConvWork(
            direction="fwd",
            conv=conv,
            dtype=dtype,
            result_dtype=dtype,
            x=x,
            w=weight_operand(weight, dtype, layout, inputs[weight].shape, conv.groups),
            y=y,
            bias=f"bias{index}" if (problem.bias0, problem.bias1)[index] else None,
            activation=(problem.activation0, problem.activation1)[index],
            precision=problem.precision,
            deterministic=problem.deterministic,
            prefix=f"{prefix}{index}.",
            follows=index == 1,
            leads=index == 0,
        )

    middle = f"{prefix}intermediate"
    # Channels last, as fast kernels take it, and without a dimension for groups: a view for either
    # convolution's.
    last, conv0 = LAYOUTS[f"N{'DHW'[-layout.ndim :]}C"], problem.conv0
    line, channels = LINE_BYTES // dtype.itemsize, conv0.out_channels
    pitch = channels if channels < line else ceil_div(channels, line) * line
    shape = activation_shape(last, conv0.batch, 1, pitch, conv0.output_size)
    between_bytes = between.size_bytes // channels * pitch

    def view(groups: int) -> Operand:
        whole = activation_operand(middle, dtype, last, shape, 1)
        n, _, c, d, h, w = whole.strides
        return replace(whole, strides=(n, channels // groups * c, c, d, h, w))

    first_y, second_x = view(conv0.groups), view(problem.conv1.groups)
    first = work(0, operand("input", inputs["input"], conv0.groups), first_y)
    second = work(1, second_x, operand("output", output, problem.conv1.groups))
    fused = FusedWork(first=first, second=second, intermediate_bytes=between_bytes)
    reasons: list[tuple[str, str]] = []
    for family in families.fused:
        reason = family.why_not(fused, device)
        if reason is None:
            chosen = Chosen(family.name, family.launches(fused, device), tuple(reasons))
            return put_together([chosen])
        reasons.append((family.name, reason))
    two = [choose_conv(part, device, families) for part in (first, second)]
    two[0] = replace(two[0], passed_over=(*reasons, *two[0].passed_over))
    return put_together(two, [Workspace(middle, between_bytes)])


def _plan_pool_fwd(problem: MaxPoolFwd, device: CudaDevice, families: Families) -> CudaPlan:
    operands = {
        name: activation_operand(name, spec.dtype, problem.layout, spec.shape, 1)
        for name, spec in (*problem.inputs.items(), *problem.outputs.items())
    }
    work = PoolWork(
        direction="fwd",
        pool=problem.pool,
        dtype=problem.dtype,
        x=operands["input"],
        y=operands["output"],
        indices=operands.get("indices"),
    )
    return put_together([choose(families.pool_fwd, work, device)])


def _plan_pool_bwd(problem: MaxPoolBwd, device: CudaDevice, families: Families) -> CudaPlan:
    operands = {
        name: activation_operand(name, spec.dtype, problem.layout, spec.shape, 1)
        for name, spec in (*problem.inputs.items(), *problem.outputs.items())
    }
    work = PoolWork(
        direction="bwd",
        pool=problem.pool,
        dtype=problem.dtype,
        x=operands["grad_input"],
        y=operands["grad_output"],
        indices=operands.get("indices"),
        source=operands.get("input"),
    )
    return put_together([choose(families.pool_bwd, work, device)])


def _plan_backprop_input(
    problem: Conv3dBackpropInput, device: CudaDevice, families: Families
) -> CudaPlan:
    """A plain bwd_data between copies out of and into the formats that have blocks."""
    formats = plan_formats(problem)
    work = ConvWork(
        direction="bwd_data",
        conv=problem.conv,
        dtype=problem.dtype,
        result_dtype=problem.dtype,
        x=formats.grad_input,
        w=formats.weight,
        y=formats.grad_output,
        precision=problem.precision,
        deterministic=problem.deterministic,
    )
    chosen = [choose(families.copy, copy, device) for copy in formats.before]
    chosen.append(choose_conv(work, device, families))
    chosen += [choose(families.copy, copy, device) for copy in formats.after]
    return put_together(chosen, formats.workspace)


PLANNERS: Mapping[type[Problem], Planner] = {
    ConvBwdData: _plan_bwd_data,
    GroupedConvBwdWeight: _plan_bwd_weight,
    MaxPoolBwd: _plan_pool_bwd,
    MaxPoolFwd: _plan_pool_fwd,
    Conv3dBackpropInput: _plan_backprop_input,
    GroupedConvConvFwd: _plan_fused,
    ConvFwd: _plan_fwd,
    ConvBackward: _plan_backward,
    ConvPasses: plan_passes,
}
"""The planner of each class of problems."""
