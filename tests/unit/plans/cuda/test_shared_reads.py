"""Both gradients of a 1x1 convolution on half of the GPU each, where they share what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.inprocess.base import problem_of
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Launch


def blocks(
    layer: tuple[int, int, int, int],
    kernel: int = 1,
    stride: int = 1,
    dtype: str = "bfloat16",
    device: CudaDevice = H200,
) -> list[int]:
    """Return the blocks of each kernel of (batch, input channels, output channels, height)."""
    batch, c, k, height = layer
    x, y = (batch, height, height, c), (batch, height // stride, height // stride, k)
    shapes = {"grad_output": y, "input": x, "weight": (k, kernel, kernel, c)}
    parameters: dict[str, Any] = {"layout": "NHWC", "stride": stride, "padding": kernel // 2}
    parameters["outputs"] = ["grad_input", "grad_weight"]
    tensors = {name: (shape, dtype) for name, shape in shapes.items()}
    plan = plan_for(problem_of("conv_backward", tensors, parameters), device, FAMILIES)
    grids = [step.grid for step in plan.steps if isinstance(step, Launch)]
    return [x * y * z for x, y, z in grids]


@pytest.mark.parametrize(
    "layer", [(128, 64, 256, 56), (128, 512, 128, 28), (128, 256, 1024, 14), (32, 64, 256, 56)]
)
def test_large_layers_share(layer: tuple[int, int, int, int]) -> None:
    both = blocks(layer)
    assert len(both) == 2
    assert max(both) <= H200.multiprocessors // 2


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ((128, 64, 256, 56), {"kernel": 3}),
        ((128, 64, 256, 56), {"stride": 2}),
        ((128, 64, 256, 56), {"dtype": "float32"}),
        ((128, 64, 256, 56), {"device": replace(H200, capability=(8, 0), name="NVIDIA A100")}),
        ((128, 256, 64, 56), {}),  # a small grad_output and little arithmetic
        ((128, 1024, 512, 14), {}),  # bound by arithmetic
        ((128, 2048, 512, 7), {}),  # fits into the L2
    ],
    ids=str,
)
def test_other_layers_have_the_whole_gpu(
    layer: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    assert max(blocks(layer, **options)) > H200.multiprocessors // 2
