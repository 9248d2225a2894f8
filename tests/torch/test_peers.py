"""PyTorch, where `/time` runs it beside our kernels, computes the same problem."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from convgrad import check, layers
from convgrad.contract import OPERATIONS, validate
from convgrad.contract.examinations import TIMINGS
from convgrad_service.backends.host_clock import HostStopwatch
from convgrad_service.examination.peers import peers_for, torch_tensors
from convgrad_service.examination.torch_operators import torch_operator
from convgrad_service.problems import problem_from
from convgrad_service.problems.examinations import TimeIt

Array = NDArray[Any]

# Beside the operations' examples: all ranks, strides, groups, biases, ceil_mode, divisors.
MORE = [
    ("conv_fwd", {"layer": "Conv1d(6, 9, 5, stride=2, padding=2, groups=3) on 2x6x17"}),
    ("grouped_conv_bwd_weight", {"layer": "Conv2d(6, 9, 3, stride=2, groups=3) on 2x6x9x8"}),
    ("grouped_conv_bwd_weight", {"layer": "mb2ic4ih8oc8kh3ph1", "outputs": ["grad_bias"]}),
    ("conv_backward", {"layer": "Conv3d(4, 6, 3, dilation=2) on 1x4x7x8x9"}),
    (
        "conv3d_backprop_input",
        {
            "layer": "mb1ic4id5oc6kd3pd1",
            "shapes": {"grad_output": [1, 5, 5, 5, 6], "weight": [6, 3, 3, 3, 4]},
            "grad_output_format": "NDHWC",
            "weight_format": "NDHWC",
            "output_format": "NDHWC",
        },
    ),
    ("conv_transpose_fwd", {"layer": "--deconv g2mb2ic4iw5oc6ow12kw4sw2"}),
    ("conv_fwd", {"layer": "mb1ic4ih8oc8kh3sh2", "padding": [[1, 0], [1, 0]]}),
    ("conv_transpose_backward", {"layer": "--deconv mb1ic4id3oc2od6kd3sd2pd1"}),
    ("conv_transpose_fwd", {"layer": "--deconv mb1ic4id3oc2od5kd3sd2pd1"}),
    (
        "conv_transpose_backward",
        {"layer": "ConvTranspose2d(4, 6, 3, stride=2, output_padding=1) on 2x4x5x5"},
    ),
    ("conv_double_backward", {"layer": "Conv1d(4, 6, 3) on 2x4x9"}),
    ("conv_transpose_double_backward", {"layer": "--deconv mb1ic4id3oc2od6kd3sd2pd1"}),
    (
        "grouped_conv_conv_fwd",
        {"layer": "--separable mb1ic4ih8oc8kh3ph1", "activation0": "relu", "activation1": "silu"},
    ),
    ("maxpool2d_fwd", {"layer": "--pool mb2ic4ih9kh3sh2ph1", "return_indices": True}),
    ("maxpool2d_bwd", {"layer": "MaxPool2d(3, stride=2, ceil_mode=True) on 2x4x8x8"}),
    ("avg_pool_fwd", {"layer": "AvgPool1d(3, stride=2, padding=1) on 2x4x9"}),
    ("avg_pool_bwd", {"layer": "AvgPool3d(3, stride=2) on 1x4x7x8x9"}),
    ("avg_pool_bwd", {"layer": "AvgPool1d(4) on 2x4x12"}),
    ("avg_pool_fwd", {"layer": "AvgPool2d(3, stride=2) on 1x4x7x8", "divisor_override": 5}),
    ("adaptive_avg_pool_fwd", {"layer": "AdaptiveAvgPool3d(2) on 1x4x5x6x7"}),
    ("adaptive_avg_pool_bwd", {"layer": "AdaptiveAvgPool1d(3) on 2x4x8"}),
    ("adaptive_max_pool_bwd", {"layer": "AdaptiveMaxPool1d(3) on 2x4x8"}),
    ("adaptive_max_pool_fwd", {"layer": "AdaptiveMaxPool3d(2) on 1x4x5x6x7"}),
    ("max_unpool_fwd", {"layer": "MaxPool1d(2) on 2x4x8"}),
    ("max_unpool_bwd", {"layer": "MaxPool3d(2) on 1x4x4x4x4"}),
    ("max_unpool_fwd", {"layer": "MaxPool3d(2) on 1x4x4x4x4"}),
]


def stated(operation: str, fields: dict[str, Any]) -> tuple[TimeIt, dict[str, Array], Any]:
    """The timing of a request, its inputs and outputs, and the operation's parameters."""
    request = validate(TIMINGS[operation].request, fields)
    problem = problem_from(f"time/{operation}", request)
    assert isinstance(problem, TimeIt)
    arrays = {}
    for name, spec in problem.subject.inputs.items():
        if name == "indices":
            plane = int(np.prod(problem.subject.output_size))  # type: ignore[attr-defined]
            layout = problem.subject.layout.name  # type: ignore[attr-defined]
            arrays[name] = check.spread_indices(spec.shape, plane, layout)
        else:
            arrays[name] = check.draw(name, spec.shape, spec.dtype.value, 3)
    for name, spec in problem.subject.outputs.items():
        arrays[name] = np.zeros(spec.shape, spec.dtype.numpy)
    return problem, arrays, json.loads(problem.parameters)


def verified(operation: str, fields: dict[str, Any]) -> None:
    problem, arrays, parameters = stated(operation, fields)
    subject = problem.subject
    run = torch_operator(torch, subject, parameters, torch_tensors(torch, arrays))
    found = run()
    made = found if isinstance(found, tuple) else (found,)
    last = any("NHWC" in str(each) or "NDHWC" in str(each) for each in fields.values())
    results = {}
    for (name, spec), tensor in zip(subject.outputs.items(), made, strict=True):
        moved = torch.movedim(tensor, 1, -1) if last and tensor.ndim > 2 else tensor
        results[name] = moved.contiguous().numpy().reshape(spec.shape)
    # A request has all tensors, also those that its problem does not read.
    shapes, _ = layers.arguments(operation, layers.parse(fields["layer"]))
    inputs = {name: arrays.get(name, np.zeros(shape)) for name, shape in shapes.items()}
    verdict = check.bounded(operation, results, **inputs, **parameters)
    assert verdict.passed, verdict.findings


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_computed(operation: str) -> None:
    verified(operation, TIMINGS[operation].example)


@pytest.mark.parametrize(
    "operation", [name for name in OPERATIONS if "3d" not in name and "1d" not in name]
)
def test_channels_last(operation: str) -> None:
    verified(operation, {**TIMINGS[operation].example, "layout": "NHWC"})


@pytest.mark.parametrize(("operation", "fields"), MORE)
def test_other_layers(operation: str, fields: dict[str, Any]) -> None:
    verified(operation, fields)


@pytest.mark.parametrize(
    ("operation", "fields", "reason"),
    [
        ("conv_fwd", {"layer": "mb1ic4ih8oc8kh3", "padding": [[1, 0], [0, 0]]}, "same padding"),
        ("conv_fwd", {"layer": "g2mb1ic4ih8oc8kh3", "layout": "NHWGC"}, "no layout NHWGC"),
        ("conv_bwd_data", {"layer": "mb1ic4ih8oc8kh3", "alpha": 2.0}, "no epilogue"),
        (
            "conv3d_backprop_input",
            {"layer": "mb1ic4id5oc6kd3pd1", "region": {"d": [0, 2]}},
            "not regions",
        ),
        ("avg_pool_fwd", {"layer": "AvgPool2d(3) on 1x1x9x9", "padding": 2}, "PyTorch does not"),
    ],
)
def test_what_pytorch_lacks_is_named(operation: str, fields: dict[str, Any], reason: str) -> None:
    problem, arrays, parameters = stated(operation, fields)
    (peer,) = peers_for(HostStopwatch(arrays, lambda: None), problem.subject, parameters)
    assert peer.watch is None
    assert peer.reason is not None
    assert reason in peer.reason


def test_a_peer_is_timed() -> None:
    problem, arrays, parameters = stated("maxpool2d_bwd", TIMINGS["maxpool2d_bwd"].example)
    (peer,) = peers_for(HostStopwatch(arrays, lambda: None), problem.subject, parameters)
    assert peer.name.endswith(", from indices")
    assert peer.watch is not None
    assert peer.watch.warm() > 0
