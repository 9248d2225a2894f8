"""From a problem to what runs on a GPU: pure functions of the problem and the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from convgrad.errors import UnsupportedProblem
from convgrad_service.plans.cuda.branches import shared_out
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families, choose
from convgrad_service.plans.cuda.formats import plan_formats
from convgrad_service.plans.cuda.program import (
    ALIGNMENT,
    CudaPlan,
    Fragment,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.sharing import taken_out
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
    Conv3dTranspose,
    ConvBackward,
    ConvBwdData,
    ConvFwd,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    MaxPoolBwd,
    MaxPoolFwd,
    Problem,
    TensorSpec,
)
from convgrad_service.problems.convolution import ConvProblem
from convgrad_service.problems.layouts import LAYOUTS, activation_shape

__all__ = ["PLANNERS", "plan_for", "put_together"]

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


def put_together(chosen: Iterable[Chosen], more: Iterable[Workspace] = ()) -> CudaPlan:
    """One plan of several pieces of work, one after another."""
    return _plan_of([(part, part.fragment) for part in chosen], (), more)


def _side_by_side(chosen: Iterable[Chosen], problem: Problem) -> CudaPlan:
    """One plan of pieces of work that need nothing of each other; what they make alike of the
    inputs goes first."""
    parts = list(chosen)
    first, fragments = taken_out([part.fragment for part in parts], problem.inputs)
    plan = _plan_of(list(zip(parts, fragments, strict=True)), first, ())
    starts = accumulate((len(one.steps) for one in fragments[:-1]), initial=len(first))
    return replace(plan, branches=tuple(starts)) if len(parts) > 1 else plan


def _plan_of(
    parts: Sequence[tuple[Chosen, Fragment]], first: tuple[Step, ...], more: Iterable[Workspace]
) -> CudaPlan:
    fragments = [fragment for _, fragment in parts]
    workspace = (*more, *(item for one in fragments for item in one.workspace))
    passed_over: dict[tuple[str, str], None] = {}
    for part, _ in parts:
        passed_over |= dict.fromkeys(part.passed_over)
    return CudaPlan(
        " + ".join(one.kernel for one in fragments),
        sum(ceil_div(w.size_bytes, ALIGNMENT) * ALIGNMENT for w in workspace),
        1,
        tuple(passed_over),
        (*first, *(step for one in fragments for step in one.steps)),
        workspace,
        tuple(check for one in fragments for check in one.checks),
        orders=tuple(f"{part.family} {part.fragment.order}".strip() for part, _ in parts),
    )


def _conv_work(
    problem: ConvProblem, direction: Any, x: str, w: str, y: str, **more: Any
) -> ConvWork:
    """A convolution on the problem's tensors, by the names of their buffers."""
    layout, groups = problem.layout, problem.conv.groups
    result = more.pop("result_dtype", problem.dtype)
    of_w = result if direction == "bwd_weight" else problem.dtype
    return ConvWork(
        direction=direction,
        conv=problem.conv,
        dtype=problem.dtype,
        result_dtype=result,
        x=activation_operand(x, problem.dtype, layout, problem.input_spec.shape, groups),
        w=weight_operand(w, of_w, layout, problem.weight_spec.shape, groups),
        y=activation_operand(y, problem.dtype, layout, problem.output_spec.shape, groups),
        precision=problem.precision,
        deterministic=problem.deterministic,
        **more,
    )


def _choose_conv(work: ConvWork, device: CudaDevice, families: Families) -> Chosen:
    return choose(families.of(work), work, device)


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
    work = _conv_work(
        problem,
        "bwd_data",
        "grad_input",
        "weight",
        "grad_output",
        accumulate=accumulate,
        alpha=epilogue.alpha,
        beta=epilogue.beta if epilogue.accumulate else 0.0,
    )
    return _choose_conv(work, device, families)


def _plan_transpose(problem: Conv3dTranspose, device: CudaDevice, families: Families) -> CudaPlan:
    bias = "bias" if problem.bias else None
    work = _conv_work(problem, "bwd_data", "output", "weight", "input", bias=bias)
    return put_together([_choose_conv(work, device, families)])


def _plan_fwd(problem: ConvFwd, device: CudaDevice, families: Families) -> CudaPlan:
    bias = "bias" if problem.bias else None
    work = _conv_work(problem, "fwd", "input", "weight", "output", bias=bias)
    return put_together([_choose_conv(work, device, families)])


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
        work = _conv_work(
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
        yield _choose_conv(work, device, families)
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
    return _side_by_side(chosen, problem)


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
    two = [_choose_conv(part, device, families) for part in (first, second)]
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
    chosen.append(_choose_conv(work, device, families))
    chosen += [choose(families.copy, copy, device) for copy in formats.after]
    return put_together(chosen, formats.workspace)


PLANNERS: Mapping[type[Problem], Planner] = {
    ConvBwdData: _plan_bwd_data,
    GroupedConvBwdWeight: _plan_bwd_weight,
    MaxPoolBwd: _plan_pool_bwd,
    MaxPoolFwd: _plan_pool_fwd,
    Conv3dBackpropInput: _plan_backprop_input,
    GroupedConvConvFwd: _plan_fused,
    Conv3dTranspose: _plan_transpose,
    ConvFwd: _plan_fwd,
    ConvBackward: _plan_backward,
}
"""The planner of each class of problems."""
