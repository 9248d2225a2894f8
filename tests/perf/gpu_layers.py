"""The suite's layers as problems, with tensors, and PyTorch's operators on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from convgrad.dtypes import DType
from convgrad_service.inprocess.base import problem_of as problem_of_request
from convgrad_service.problems import (
    GroupedConvConvFwd,
    MaxPoolBwd,
    Problem,
)
from convgrad_service.problems.geometry import PoolShape
from tests.perf import gpu_poolings
from tests.perf.layer_problems import layout_of, problem_of, shape_of

__all__ = ["Case", "Tensors", "cases_of", "torch_dtype"]

COPY_BYTES_PER_S = 4.27e12
NODE_S = 3.1e-6
# Dense matrix peaks and, for depthwise layers, that of the FMA units; TF32 half of bf16.
PEAK_FLOPS = {"float16": 799e12, "bfloat16": 799e12, "float32": 399e12}
FMA_FLOPS = 60e12
OPERATIONS = {
    "pool": ("maxpool_bwd",),
    "separable": ("grouped_conv_conv_fwd",),
    "transposed": (
        "conv_transpose_fwd",
        "conv_transpose_backward",
        "conv_transpose_double_backward",
    ),
}
CONVOLUTIONS = ("conv_bwd_data", "grouped_conv_bwd_weight")
# What is measured of layers of kind "conv" where it is asked for by name.
MORE = ("conv_fwd", "conv_backward", "conv_double_backward")

Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One layer, one operation: the problem, its tensors, and the peer on the same tensors.

    The peer gives its result, or a list of them in the order of the problem's outputs.
    """

    layer: Mapping[str, Any]
    op: str
    problem: Problem
    tensors: Tensors
    peer: Callable[[Tensors], Any]
    dtype: str
    layout: str

    @property
    def true_float32(self) -> bool:
        """Whether each product takes three of TF32."""
        return self.dtype == "float32" and getattr(self.problem, "precision", "") == "highest"

    @property
    def reference_s(self) -> float:
        """The time that bytes and arithmetic allow, and an empty graph node's."""
        flops = self.problem.valid_flops
        compute = flops / PEAK_FLOPS[self.dtype]
        if self.true_float32:
            compute *= 3
        if self.layer["class"] == "depthwise":
            compute = flops / FMA_FLOPS
        if "pool" in self.layer["class"]:
            compute = 0.0
        return max(compute, self.problem.compulsory_bytes / COPY_BYTES_PER_S) + NODE_S


def torch_dtype(name: str) -> Any:
    return getattr(torch, name)


def random_tensor(shape: tuple[int, ...], dtype: str) -> Any:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(torch_dtype(dtype))


def channels_first(tensor: Any, last: bool) -> Any:
    """A view in PyTorch's order of dimensions, whatever lies behind it."""
    return tensor.movedim(-1, 1) if last else tensor


def cases_of(
    layer: Mapping[str, Any], dtype: str, layout: str, ops: tuple[str, ...]
) -> Iterator[Case]:
    """The operations of a layer's class."""
    if "pool" in layer["class"] and layer["class"] not in OPERATIONS:
        for op in gpu_poolings.operations_of(layer):
            if not ops or op in ops:
                yield _pooling_case(layer, dtype, layout, op)
        return
    for op in OPERATIONS.get(layer["class"], CONVOLUTIONS):
        if not ops or op in ops:
            yield CASES[op](layer, dtype, layout, op)
    for op in MORE if layer["kind"] == "conv" else ():
        if op in ops:
            yield CASES[op](layer, dtype, layout, op)


def _conv_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    outputs = {
        "conv_bwd_data": [True, False, False],
        "grouped_conv_bwd_weight": [False, True, False],
        "conv_backward": [True, True, False],
        "conv_fwd": None,
    }[op]
    last = layout == "NHWC"
    problem = problem_of(layer, dtype, layout, op)
    specs = {**problem.inputs}
    specs.setdefault("input", problem.input_spec)
    specs.setdefault("weight", problem.weight_spec)
    tensors = {name: random_tensor(spec.shape, dtype) for name, spec in specs.items()}

    def peer(given: Tensors) -> Any:
        x, w = (channels_first(given[name], last) for name in ("input", "weight"))
        geometry = layer["stride"], layer["padding"], layer["dilation"]
        zeros = [0] * layer["ndim"]
        if outputs is None:
            results = [
                torch.ops.aten.convolution(x, w, None, *geometry, False, zeros, layer["groups"])
            ]
        else:
            grad = channels_first(given["grad_output"], last)
            found = torch.ops.aten.convolution_backward(
                grad, x, w, None, *geometry, False, zeros, layer["groups"], outputs
            )
            results = [one for one, wanted in zip(found, outputs, strict=True) if wanted]
        results = [result.movedim(1, -1) if last else result for result in results]
        return results if len(results) > 1 else results[0]

    return Case(layer, op, problem, tensors, peer, dtype, layout)


def _pool_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    parsed, last = layout_of(layer, layout)
    ndim = layer["ndim"]
    pool = PoolShape(
        batch=layer["N"],
        channels=layer["C"],
        input_size=tuple(layer["input_size"]),
        kernel_size=tuple(layer["kernel_size"]),
        output_size=tuple(layer["output_size"]),
        stride=tuple(layer["stride"]),
        padding=tuple((pad, pad) for pad in layer["padding"]),
        dilation=tuple(layer["dilation"]),
        ceil_mode=False,
    )
    problem = MaxPoolBwd(
        pool=pool, dtype=DType(dtype), layout=parsed, source="input", index_dtype=None
    )
    tensors = {name: random_tensor(spec.shape, dtype) for name, spec in problem.inputs.items()}
    window = layer["kernel_size"], layer["stride"], layer["padding"], layer["dilation"]
    forward = getattr(torch.ops.aten, f"max_pool{ndim}d_with_indices")
    backward = getattr(torch.ops.aten, f"max_pool{ndim}d_with_indices_backward")
    x = channels_first(tensors["input"], last)
    indices = forward(x, *window)[1]

    def peer(given: Tensors) -> Any:
        """ATen's, with the indices given to it."""
        grad = channels_first(given["grad_output"], last)
        result = backward(grad, channels_first(given["input"], last), *window, False, indices)
        return result.movedim(1, -1) if last else result

    return Case(layer, f"maxpool{ndim}d_bwd", problem, tensors, peer, dtype, layout)


def _pooling_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    problem = gpu_poolings.problem_of(layer, dtype, layout, op)
    tensors = gpu_poolings.tensors_of(layer, problem, layout)
    peer = gpu_poolings.peer_of(layer, layout, op)
    return Case(layer, op, problem, tensors, peer, dtype, layout)


def _separable_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    parsed, last = layout_of(layer, layout)
    first = shape_of({**layer, "groups": layer["C"], "K": layer["C"]})
    ones = {"kernel_size": [1, 1], "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    second = shape_of({**layer, **ones, "groups": 1, "input_size": layer["output_size"]})
    problem = GroupedConvConvFwd(
        conv0=first,
        conv1=second,
        dtype=DType(dtype),
        layout=parsed,
        bias0=False,
        bias1=False,
        activation0="none",
        activation1="none",
        precision="high" if dtype == "float32" else "highest",
    )
    tensors = {name: random_tensor(spec.shape, dtype) for name, spec in problem.inputs.items()}

    def peer(given: Tensors) -> Any:
        x, w0, w1 = (channels_first(given[name], last) for name in ("input", "weight0", "weight1"))
        between = torch.nn.functional.conv2d(
            x, w0, None, layer["stride"], layer["padding"], layer["dilation"], layer["C"]
        )
        result = torch.nn.functional.conv2d(between, w1)
        return result.movedim(1, -1) if last else result

    return Case(layer, op, problem, tensors, peer, dtype, layout)


def _request_case(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Case:
    """A transposed convolution, or second derivatives, from the request that asks for it."""
    transposed = layer["kind"] == "conv_transpose"
    parsed, last = layout_of(layer, layout)
    batch, groups, ndim = layer["N"], layer["groups"], layer["ndim"]
    outer, inner = (layer["C"], layer["K"]) if transposed else (layer["K"], layer["C"])

    def placed(first: int, channels: int, size: Sequence[int]) -> tuple[int, ...]:
        return (first, *size, channels) if last else (first, channels, *size)

    x = placed(batch, layer["C"], layer["input_size"])
    w = placed(outer, inner // groups, layer["kernel_size"])
    y = placed(batch, layer["K"], layer["output_size"])
    bias = {"bias": (layer["K"],)} if layer.get("bias") else {}
    shapes: dict[str, tuple[int, ...]] = {"input": x, "weight": w}
    if op == "conv_transpose_fwd":
        shapes |= bias
    else:
        shapes = {"grad_output": y, **shapes}
    if "double" in op:
        shapes |= {"grad_grad_input": x, "grad_grad_weight": w}
    names = ("stride", "padding", "dilation", "groups")
    parameters = {name: layer[name] for name in names} | {"layout": parsed.name}
    extra = layer.get("output_padding", [0] * ndim)
    if transposed:
        parameters["output_padding"] = extra
    if dtype == "float32":
        parameters["precision"] = "high"
    mask = [True, True, bool(bias)]
    if op == "conv_transpose_backward" and not bias:
        parameters["outputs"] = ["grad_input", "grad_weight"]
    problem = problem_of_request(
        op, {name: (shape, dtype) for name, shape in shapes.items()}, parameters
    )
    tensors = {name: random_tensor(shape, dtype) for name, shape in shapes.items()}
    steps = (layer["stride"], layer["padding"], layer["dilation"], transposed, extra, groups)

    def peer(given: Tensors) -> Any:
        a, b = (channels_first(given[name], last) for name in ("input", "weight"))
        if op == "conv_transpose_fwd":
            found = [torch.ops.aten.convolution(a, b, given.get("bias"), *steps)]
        else:
            grad = channels_first(given["grad_output"], last)
            found = (
                _second_derivatives(given, (grad, b, a), steps, last)
                if "double" in op
                else torch.ops.aten.convolution_backward(grad, a, b, [layer["K"]], *steps, mask)
            )
        results = [
            one.movedim(1, -1) if last and one.dim() > 1 else one
            for one in found
            if one is not None
        ]
        return results if len(results) > 1 else results[0]

    return Case(layer, op, problem, tensors, peer, dtype, layout)


def _second_derivatives(given: Tensors, own: Any, steps: Any, last: bool) -> Any:
    second = [channels_first(given[f"grad_grad_{name}"], last) for name in ("input", "weight")]
    every = [True, True, True]
    return torch.ops.aten._convolution_double_backward(*second, None, *own, *steps, every)


CASES: Mapping[str, Callable[[Mapping[str, Any], str, str, str], Case]] = {
    **dict.fromkeys((*CONVOLUTIONS, "conv_fwd", "conv_backward"), _conv_case),
    "maxpool_bwd": _pool_case,
    "grouped_conv_conv_fwd": _separable_case,
    **dict.fromkeys(
        (
            "conv_transpose_fwd",
            "conv_transpose_backward",
            "conv_double_backward",
            "conv_transpose_double_backward",
        ),
        _request_case,
    ),
}
