"""Weight gradients as planned: each tensor is read by one launch; float32 by parts where faster."""

from __future__ import annotations

from collections import Counter

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.families import choose
from convgrad_service.plans.cuda.program import Launch
from tests.support.kernels.conv_work import ADA, work_of

# Channels in and out of a group, groups, size, kernel, stride, batch.
LAYERS = {
    "dense": (64, 64, 1, 56, 3, 1, 64),
    "large": (256, 256, 1, 56, 3, 1, 64),
    "strided": (128, 128, 1, 56, 3, 2, 64),
    "pointwise": (1024, 256, 1, 14, 1, 1, 64),
    "short": (512, 512, 1, 7, 3, 1, 1),
    "first": (3, 64, 1, 224, 7, 2, 8),
    "grouped": (4, 4, 32, 56, 3, 1, 8),
    "depthwise": (1, 1, 96, 28, 3, 1, 8),
}
PRECISIONS = ((DType.BFLOAT16, "highest"), (DType.FLOAT32, "high"), (DType.FLOAT32, "highest"))


@pytest.mark.parametrize("device", [H200, ADA], ids=lambda device: device.name)
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("name", LAYERS)
def test_each_tensor_is_read_once(
    name: str, layout: str, dtype: DType, precision: str, device: CudaDevice
) -> None:
    """Summing results again that are in doubt, element by element, would read them once more."""
    c, k, groups, size, kernel, stride, batch = LAYERS[name]
    work = work_of(
        "bwd_weight",
        batch=batch,
        channels=(c, k),
        groups=groups,
        size=size,
        kernel=kernel,
        stride=stride,
        pad=kernel // 2,
        layout=layout,
        dtype=dtype,
        precision=precision,
    )
    steps = choose(FAMILIES.bwd_weight, work, device).fragment.steps
    launches = [step for step in steps if isinstance(step, Launch)]
    # The launch that splits float32 again ends at once, except for the largest magnitudes.
    again = [step for step in launches if step.instance.entry == "float_parts"][1:]
    once = [step for step in launches if step not in again]
    read = Counter(name for step in once for name in set(step.arguments.buffers))
    assert read["x"] == read["y"] == 1


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize(
    ("channels", "size", "kernel", "batch", "precision", "split"),
    [
        ((960, 320), 7, 3, 30, "high", True),
        ((256, 256), 56, 3, 64, "highest", True),
        ((960, 320), 7, 3, 32, "highest", True),
        ((64, 256), 56, 1, 64, "high", False),
        ((64, 64), 56, 1, 32, "highest", False),
    ],
)
def test_float32_is_split_where_that_is_expected_to_be_faster(
    channels: tuple[int, int],
    size: int,
    kernel: int,
    batch: int,
    precision: str,
    split: bool,
    layout: str,
) -> None:
    work = work_of(
        "bwd_weight",
        channels=channels,
        size=size,
        kernel=kernel,
        pad=kernel // 2,
        batch=batch,
        layout=layout,
        dtype=DType.FLOAT32,
        precision=precision,
    )
    chosen = choose(FAMILIES.bwd_weight, work, H200)
    assert chosen.family.startswith("split_weight") is split
