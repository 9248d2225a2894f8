"""Plans of several passes of one convolution, each a branch that runs concurrently with others."""

from __future__ import annotations

from typing import Literal

from convgrad_service.plans.cuda.assembly import (
    choose_conv,
    concurrent_plan,
    conv_work,
    work_on,
)
from convgrad_service.plans.cuda.concatenation import concatenate_operands
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Chosen, Families, choose
from convgrad_service.plans.cuda.program import Clear, CudaPlan, Fragment, Workspace
from convgrad_service.plans.cuda.sm_partition import partition_multiprocessors
from convgrad_service.plans.cuda.works import (
    ChannelSums,
    ConvWork,
    Copy,
    CopyAxis,
    Operand,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems.passes import ConvPasses, Pass
from convgrad_service.problems.sizes import size3

__all__ = ["plan_passes"]

ORDER = {"bwd_weight": 0, "input_sums": 1}


def plan_passes(problem: ConvPasses, device: CudaDevice, families: Families) -> CudaPlan:
    """Plan the weight's gradient first, as `planner` does for conv_backward.

    Two passes of one product each share the multiprocessors.
    """
    passes = sorted(problem.passes, key=lambda one: ORDER.get(one.direction, len(ORDER)))
    planner = _Planner(problem, families)
    branches = [planner.branch(one, device) for one in passes]
    products = [one for one in passes if len(one.terms) == 1 and one.direction != "input_sums"]
    if len(products) == 2 and products[0].direction == "bwd_weight":
        (first,), (second,) = (branches[passes.index(one)] for one in products)
        shared = partition_multiprocessors(
            (first, second),
            lambda share: planner.branch(products[0], share)[0],
            lambda share: planner.branch(products[1], share)[0],
            device,
        )
        for one, chosen in zip(products, shared, strict=True):
            branches[passes.index(one)] = [chosen]
    return concurrent_plan(branches, problem, planner.workspace)


class _Planner:
    """Plans the passes of one problem; ``workspace`` is theirs, without the families' own."""

    def __init__(self, problem: ConvPasses, families: Families) -> None:
        self._problem, self._families = problem, families
        self.workspace: list[Workspace] = []

    def branch(self, one: Pass, device: CudaDevice) -> list[Chosen]:
        """Return the pieces of work of a pass, in order."""
        if one.direction == "input_sums":
            return [choose(self._families.channel_sums, self._sums(one), device)]
        if not one.terms:
            return [self._constant(one, device)]
        if len(one.terms) == 1:
            return [choose_conv(self._work(one), device, self._families)]
        work, copies = self._concatenated(one)
        chosen = [choose(self._families.copy, copy, device) for copy in copies]
        return [*chosen, choose_conv(work, device, self._families)]

    def _work(self, one: Pass) -> ConvWork:
        names = {side: name for name, side in one.sides.items()}
        names[one.written or "x"] = one.output
        spec = self._problem.outputs[one.output]
        return conv_work(
            self._problem,
            one.direction,
            names["x"],
            names["w"],
            names["y"],
            result_dtype=spec.dtype,
            bias=one.bias,
            prefix=f"{one.output}.",
        )

    def _concatenated(self, one: Pass) -> tuple[ConvWork, tuple[Copy, ...]]:
        """Return the sum of two products as one convolution, and the copies of its operands."""
        problem, forward = self._problem, one.direction == "fwd"
        activations = [self._operand(name) for name, _ in one.terms]
        weights = [self._weight(name) for _, name in one.terms]
        direction: Literal["fwd", "bwd_data"] = "fwd" if forward else "bwd_data"
        plan = concatenate_operands(problem.conv, direction, activations, weights, f"{one.output}.")
        self.workspace += plan.workspace
        result = self._operand(one.output)
        x, y = (plan.activation, result) if forward else (result, plan.activation)
        more = {"bias": one.bias, "prefix": f"{one.output}."}
        work = work_on(problem, direction, plan.conv, x, plan.weight, y, **more)
        return work, plan.copies

    def _sums(self, one: Pass) -> ChannelSums:
        """Return sums over the input, which takes the place of the output that the kernel sums."""
        ((name,),) = one.terms
        problem, conv = self._problem, self._problem.conv
        return ChannelSums(
            conv=conv.with_output_like_input(),
            y=self._operand(name),
            result=one.output,
            result_dtype=problem.outputs[one.output].dtype,
            prefix=f"{one.output}.",
        )

    def _constant(self, one: Pass, device: CudaDevice) -> Chosen:
        """Fill an output without products with zero, or with the bias."""
        spec, conv = self._problem.outputs[one.output], self._problem.conv
        if one.bias is None:
            clear = Clear(one.output, spec.size_bytes)
            return Chosen("clear", Fragment("clear", (clear,)), ())
        target = self._operand(one.output)
        is_output = one.written == "y"
        size = conv.output_size if is_output else conv.input_size
        channels = conv.out_channels_per_group if is_output else conv.in_channels_per_group
        extents = (conv.batch, conv.groups, channels, *size3(size))
        sources = (0, channels, 1, 0, 0, 0)
        axes = [CopyAxis(*each) for each in zip(extents, sources, target.strides, strict=True)]
        axes.sort(key=lambda axis: axis.target, reverse=True)
        copy = Copy(one.bias, one.output, spec.dtype, tuple(axes), follows=False)
        return choose(self._families.copy, copy, device)

    def _operand(self, name: str) -> Operand:
        problem = self._problem
        spec = {**problem.inputs, **problem.outputs}[name]
        groups = problem.conv.groups
        return activation_operand(name, problem.dtype, problem.layout, spec.shape, groups)

    def _weight(self, name: str) -> Operand:
        problem = self._problem
        shape, groups = problem.weight_spec.shape, problem.conv.groups
        return weight_operand(name, problem.dtype, problem.layout, shape, groups)
