"""Plans of the fused forward: what is fused, how it is laid over the GPU, and what is not. Hopper's
own kernel: test_plans_cuda_separable.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fused.fused_separable import FusedSeparable
from convgrad_service.backends.cuda.kernels.fused.fused_shapes import FusedShape
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Launch
from convgrad_service.problems import GroupedConvConvFwd, Problem
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS

AMPERE = replace(H200, name="A100", capability=(8, 0))
SMALL = replace(
    H200,
    name="RTX 4090",
    capability=(8, 9),
    shared_bytes_per_block=101376,
    shared_bytes_per_multiprocessor=102400,
)
DEVICES = (H200, AMPERE, SMALL)
# Without the kernel that is for Hopper alone.
GENERAL = replace(
    FAMILIES,
    fused=tuple(one for one in FAMILIES.fused if not one.name.startswith("hopper_separable")),
)


def conv(
    batch: int,
    channels: int,
    outputs: int,
    size: tuple[int, ...],
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    pad: int = 0,
) -> ConvShape:
    ndim = len(size)
    return ConvShape(
        batch=batch,
        groups=groups,
        in_channels=channels,
        out_channels=outputs,
        input_size=size,
        kernel_size=(kernel,) * ndim,
        output_size=tuple((extent + 2 * pad - kernel) // stride + 1 for extent in size),
        stride=(stride,) * ndim,
        padding=((pad, pad),) * ndim,
        dilation=(1,) * ndim,
    )


def fused(
    first: ConvShape, second: ConvShape, dtype: DType = DType.BFLOAT16, layout: str = "NHWC"
) -> GroupedConvConvFwd:
    return GroupedConvConvFwd(
        conv0=first,
        conv1=second,
        dtype=dtype,
        layout=LAYOUTS[layout],
        bias0=True,
        bias1=True,
        activation0="relu6",
        activation1="silu",
        precision="highest",
    )


def separable(
    channels: int,
    outputs: int,
    size: tuple[int, ...] = (14, 14),
    kernel: int = 3,
    stride: int = 1,
    batch: int = 64,
    **more: object,
) -> GroupedConvConvFwd:
    first = conv(batch, channels, channels, size, kernel, stride, channels, kernel // 2)
    second = conv(batch, channels, outputs, first.output_size)
    return fused(first, second, **more)  # type: ignore[arg-type]


def plan(problem: Problem, device: CudaDevice = H200) -> CudaPlan:
    return plan_for(problem, device, GENERAL)


def reasons(made: CudaPlan, family: str = "fused_separable") -> str:
    return dict(made.passed_over)[family]


def check_one_launch(made: CudaPlan, outputs: int, device: CudaDevice) -> Launch:
    """With what a block asks for within its shared memory, and every output channel in the share
    of one part of the grid."""
    [step] = made.steps
    assert isinstance(step, Launch)
    assert made.kernel.startswith("fused_separable")
    assert not made.workspace
    assert step.shared_bytes <= device.shared_bytes_per_block
    columns, passes = map(int, made.kernel.rsplit("_", 1)[1].split("x")[1:])
    shares = columns * passes * step.grid[1]
    assert outputs <= shares < outputs + columns * (step.grid[1] + 1)
    return step


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [8, 32, 64])
def test_depthwise_then_pointwise_is_one_launch(
    device: CudaDevice, kernel: int, stride: int, channels: int
) -> None:
    for outputs in (8, 64, 67, 128):
        made = plan(separable(channels, outputs, kernel=kernel, stride=stride), device)
        assert check_one_launch(made, outputs, device).instance in FAMILIES.instances()


@pytest.mark.parametrize("channels", [64, 256, 512, 728, 2048])
def test_many_channels_can_be_one_launch(channels: int) -> None:
    """Where a family is asked for it: by itself it leaves them to two."""
    shape = FusedShape(2, 2, 96, 1, roles=True)
    families = replace(GENERAL, fused=[FusedSeparable([shape])])
    for outputs in (67, 512, 2048):
        problem = separable(channels, outputs)
        check_one_launch(plan_for(problem, H200, families), outputs, H200)
    assert f"{channels} to 2048 channels" in reasons(plan(problem))


def test_hopper_has_products_of_its_own() -> None:
    for device, wanted in ((H200, "1"), (AMPERE, "0")):
        step = check_one_launch(plan(separable(64, 64), device), 64, device)
        assert dict(step.instance.defines)["WARPGROUP"] == wanted
        assert step.instance.runs_on(device)


def test_a_second_convolution_with_taps_is_not_fused() -> None:
    first = conv(2, 32, 32, (14, 14), 3, 1, 32, 1)
    made = plan(fused(first, conv(2, 32, 32, first.output_size, 3)))
    assert len([step for step in made.steps if isinstance(step, Launch)]) > 1
    assert "second convolution is not 1x1" in reasons(made)
    assert [workspace.name for workspace in made.workspace][:1] == ["fused.intermediate"]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (conv(2, 32, 32, (14, 14), 3, 1, 4, 1), "not depthwise"),
        (conv(2, 36, 36, (14, 14), 3, 1, 36, 1), "36 channels"),
        (conv(2, 32, 64, (14, 14), 3, 1, 32, 1), "not depthwise"),
    ],
)
def test_other_first_convolutions_are_two_launches(first: ConvShape, said: str) -> None:
    made = plan(fused(first, conv(2, first.out_channels, 32, first.output_size)))
    assert said in reasons(made)


def test_float32_is_two_launches() -> None:
    assert "float32" in reasons(plan(separable(32, 32, dtype=DType.FLOAT32)))


def test_channels_first_goes_by_way_of_copies() -> None:
    made = plan(separable(64, 128, layout="NCHW"))
    assert made.kernel.startswith("fused_separable")
    assert made.kernel.endswith("through_channels_last")
    assert len(made.steps) == 3


def test_pieces_choose_as_the_whole() -> None:
    """Every tiling gives the same bits; what must not change is whether the sums are rounded
    between."""
    whole = separable(64, 128, batch=64)
    for piece in whole.split(5):
        assert plan(piece.problem).kernel.split("_")[:2] == plan(whole).kernel.split("_")[:2]


def test_instances_are_few() -> None:
    assert len(list(FusedSeparable().instances())) <= 100
