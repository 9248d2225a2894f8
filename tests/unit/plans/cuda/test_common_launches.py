"""What both gradients of a convolution make alike of an input is made once."""

from __future__ import annotations

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import Packed
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.common_launches import hoist_common_launches
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import (
    Clear,
    CudaPlan,
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
)
from convgrad_service.problems import ConvBackward
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS

CONV = ConvShape(
    batch=8,
    groups=1,
    in_channels=128,
    out_channels=256,
    input_size=(28, 28),
    kernel_size=(3, 3),
    output_size=(28, 28),
    stride=(1, 1),
    padding=((1, 1), (1, 1)),
    dilation=(1, 1),
)


def plan_of(layout: str, *wanted: str) -> CudaPlan:
    problem = ConvBackward(conv=CONV, dtype=DType.BFLOAT16, layout=LAYOUTS[layout], wanted=wanted)
    return plan_for(problem, H200, FAMILIES)


def readers(plan: CudaPlan, buffer: str) -> int:
    return sum(isinstance(step, Launch) and buffer in step.arguments.buffers for step in plan.steps)


def test_grad_output_is_brought_into_order_once() -> None:
    plan = plan_of("NCHW", "grad_input", "grad_weight")
    assert readers(plan, "grad_output") == 1
    assert plan.branches[0] == 1, "before both"
    first = plan.steps[0]
    assert isinstance(first, Launch)
    (copy,) = set(first.arguments.buffers) - {"grad_output"}
    of_weight, of_data = (
        CudaPlan("", 0, 1, (), plan.steps[slice(*cut)])
        for cut in (plan.branches, (plan.branches[1], len(plan.steps)))
    )
    assert readers(of_weight, copy)
    assert readers(of_data, copy)
    assert [item.name for item in plan.workspace].count(copy) == 1


def test_channels_last_nothing_is_shared() -> None:
    assert plan_of("NHWC", "grad_input", "grad_weight").branches[0] == 0


def test_one_gradient_has_no_branches() -> None:
    assert plan_of("NCHW", "grad_input").branches == ()


def launch(template: bytes, *buffers: str) -> Launch:
    arguments = Packed(template, tuple((i, name, 0) for i, name in enumerate(buffers)))
    return Launch(Instance("copy.cu", "copy"), (1, 1, 1), (32, 1, 1), arguments)


def fragment(name: str, *steps: Step, workspace: str) -> Fragment:
    return Fragment(name, steps, (Workspace(workspace, 16),))


def test_only_the_same_launch_of_the_same_input_is_shared() -> None:
    first = fragment("first", launch(b"a", "x", "w1"), launch(b"b", "w1", "o1"), workspace="w1")
    cases = {
        "other parameters": launch(b"c", "x", "w2"),
        "another input": launch(b"a", "y", "w2"),
        "another grid": Launch(
            Instance("copy.cu", "copy"),
            (2, 1, 1),
            (32, 1, 1),
            Packed(b"a", ((0, "x", 0), (1, "w2", 0))),
        ),
        "more buffers": launch(b"a", "x", "w2", "o2"),
    }
    for what, step in cases.items():
        second = fragment("second", step, workspace="w2")
        common, left = hoist_common_launches([first, second], ["x", "y"])
        assert common == (), what
        assert left == [first, second], what


def test_what_is_shared_is_renamed_wherever_it_is_used() -> None:
    first = fragment("first", launch(b"a", "x", "w1"), launch(b"b", "w1", "o1"), workspace="w1")
    second = fragment("second", launch(b"a", "x", "w2"), launch(b"c", "o2", "w2"), workspace="w2")
    common, left = hoist_common_launches([first, second], ["x"])
    assert common == (launch(b"a", "x", "w1"),)
    assert left[0] == fragment("first", launch(b"b", "w1", "o1"), workspace="w1")
    assert left[1] == Fragment("second", (launch(b"c", "o2", "w1"),))


def test_a_workspace_that_was_written_before_is_not_shared() -> None:
    """The launch may add to what is there."""
    first = fragment("first", launch(b"a", "x", "w1"), workspace="w1")
    second = fragment("second", Clear("w2", 16), launch(b"a", "x", "w2"), workspace="w2")
    common, left = hoist_common_launches([first, second], ["x"])
    assert common == ()
    assert left == [first, second]
