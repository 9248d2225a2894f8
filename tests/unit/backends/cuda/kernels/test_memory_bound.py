"""The plans of the memory-bound kernels: depthwise convolutions and pooling's gradient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_mma import chunk_rows
from convgrad_service.backends.cuda.kernels.pool.pool_tiles import Shape
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Launch
from convgrad_service.problems import ConvBwdData, ConvFwd, GroupedConvBwdWeight, MaxPoolBwd
from convgrad_service.problems.geometry import ConvShape, PoolShape
from convgrad_service.problems.layouts import LAYOUTS
from tests.perf.layer_problems import shape_of

SUITE = Path(__file__).parents[4] / "perf" / "suite" / "layers.json"
LAYERS: list[dict[str, Any]] = json.loads(SUITE.read_text(encoding="utf-8"))
DEPTHWISE = [layer for layer in LAYERS if layer["class"] == "depthwise"]
POOLS = [layer for layer in LAYERS if layer["class"] == "pool"]
# Channels first, the bytes of the largest elements that are worth copies to channels last.
COPIED = {"inception_pool_3x3_s1": 2, "sppf_pool_5x5_s1": 4, "i3d_pool_3x3x3_s1": 4}
INSTANCES = set(FAMILIES.instances())
TYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)


def conv_of(layer: dict[str, Any], channels: int | None = None) -> ConvShape:
    channels = channels or layer["C"]
    return shape_of({**layer, "C": channels, "K": channels, "groups": channels})


def pool_of(layer: dict[str, Any], dtype: DType, last: bool) -> MaxPoolBwd:
    spatial = "DHW"[-layer["ndim"] :]
    return MaxPoolBwd(
        pool=PoolShape(
            batch=layer["N"],
            channels=layer["C"],
            input_size=tuple(layer["input_size"]),
            kernel_size=tuple(layer["kernel_size"]),
            output_size=tuple(layer["output_size"]),
            stride=tuple(layer["stride"]),
            padding=tuple((pad, pad) for pad in layer["padding"]),
            dilation=tuple(layer["dilation"]),
            ceil_mode=False,
        ),
        dtype=dtype,
        layout=LAYOUTS[f"N{spatial}C" if last else f"NC{spatial}"],
        source="input",
        index_dtype=None,
    )


def launches(plan: CudaPlan) -> list[Launch]:
    return [step for step in plan.steps if isinstance(step, Launch)]


def check_launch(plan: CudaPlan, count: int = 1) -> None:
    """So many launches, of instances that are listed, which the device can hold."""
    made = list(launches(plan))
    assert len(made) == count
    for launch in made:
        assert launch.instance in INSTANCES, launch.instance
        assert launch.shared_bytes <= H200.shared_bytes_per_block, launch
        assert launch.block[0] * launch.block[1] * launch.block[2] <= 1024, launch


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layer", DEPTHWISE, ids=lambda layer: layer["name"])
def test_depthwise_layers_take_one_launch(layer: dict[str, Any], dtype: DType) -> None:
    conv, layout = conv_of(layer), LAYOUTS["NHWC"]
    for problem in (
        ConvFwd(conv=conv, dtype=dtype, layout=layout, bias=True),
        ConvBwdData(conv=conv, dtype=dtype, layout=layout),
        GroupedConvBwdWeight(
            conv=conv, dtype=dtype, layout=layout, weight_dtype=dtype, split_k=None
        ),
    ):
        plan = plan_for(problem, H200, FAMILIES)
        assert plan.kernel.removeprefix("hopper_").startswith("depthwise"), plan.kernel
        check_launch(plan)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layer", POOLS, ids=lambda layer: layer["name"])
def test_pool_layers_take_a_fast_kernel(layer: dict[str, Any], dtype: DType, last: bool) -> None:
    plan = plan_for(pool_of(layer, dtype, last), H200, FAMILIES)
    kernel, through, _ = plan.kernel.partition("_through_channels_last")
    if layer["kernel_size"] == layer["stride"]:
        assert plan.kernel == "pool_cells"
    elif last:
        assert plan.kernel in ("pool_strips", "pool_tiles")
    else:
        worth = dtype.itemsize <= COPIED.get(layer["name"], 0)
        assert bool(through) == worth
        assert kernel in (("pool_strips", "pool_tiles") if worth else ("pool_through_indices",))
    check_launch(plan, 4 if through else 2 if kernel == "pool_through_indices" else 1)


def test_what_depthwise_leaves_to_others() -> None:
    layer = DEPTHWISE[0]
    first = ConvBwdData(conv=conv_of(layer), dtype=DType.BFLOAT16, layout=LAYOUTS["NCHW"])
    double = ConvBwdData(conv=conv_of(layer), dtype=DType.FLOAT64, layout=LAYOUTS["NHWC"])
    for problem, reason in ((first, "the channels are not contiguous"), (double, "float64")):
        passed_over = dict(plan_for(problem, H200, FAMILIES).passed_over)
        assert passed_over["depthwise_direct"] == reason


@pytest.mark.parametrize("rows", [1, 2, 7, 56, 1000])
@pytest.mark.parametrize("work", [1, 100, 10_000])
def test_chunks_are_some_of_the_rows(rows: int, work: int) -> None:
    assert 1 <= chunk_rows(rows, 2, work, 2112) <= rows


@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("pad", range(5))
def test_a_tile_has_all_windows_that_touch_it(kernel: int, pad: int) -> None:
    """Brute force: the windows over a tile, and the positions under those windows, fit the box."""
    box = Shape(kernel, 28, False, DType.BFLOAT16, 8)
    for own in range(0, 4 * box.tile, box.tile):
        first = own + pad - kernel + 1
        touching = [
            o
            for o in range(-100, 300)
            if any(own <= o + r - pad < own + box.tile for r in range(kernel))
        ]
        assert first <= touching[0]
        assert touching[-1] < first + box.windows
        assert first - pad <= own
        assert own + box.tile <= first - pad + box.lines
        assert box.windows - 1 + kernel <= box.lines


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [36, 97, 100])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layer", DEPTHWISE, ids=lambda layer: layer["name"])
def test_any_number_of_channels_has_a_depthwise_kernel(
    layer: dict[str, Any], dtype: DType, channels: int, layout: str
) -> None:
    conv = conv_of(layer, channels)
    for problem in (
        ConvFwd(conv=conv, dtype=dtype, layout=LAYOUTS[layout], bias=True),
        ConvBwdData(conv=conv, dtype=dtype, layout=LAYOUTS[layout]),
        GroupedConvBwdWeight(
            conv=conv, dtype=dtype, layout=LAYOUTS[layout], weight_dtype=dtype, split_k=None
        ),
    ):
        plan = plan_for(problem, H200, FAMILIES)
        assert plan.kernel.removeprefix("hopper_").startswith("depthwise"), plan.kernel
