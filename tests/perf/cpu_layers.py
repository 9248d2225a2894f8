"""Layers for the CPU kernels, and each of their operations in PyTorch on the same tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import problem_from

try:
    import torch
except ImportError:
    sys.exit("bench-cpu compares with PyTorch: run `make bench-cpu`, or install torch (CPU build)")

__all__ = [
    "LAYERS",
    "Layer",
    "Pair",
    "convolution_pairs",
    "pairs",
    "pooling_pairs",
    "transposed_pairs",
]

FIRST, LAST = {1: "NCW", 2: "NCHW", 3: "NCDHW"}, {1: "NWC", 2: "NHWC", 3: "NDHWC"}
MEMORY_FORMAT = {2: torch.channels_last, 3: torch.channels_last_3d}

Array = NDArray[Any]
Run = Callable[[], Any]


@dataclass(frozen=True)
class Layer:
    """One layer; all sizes by dimension."""

    name: str
    kind: str
    size: tuple[int, ...]
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    batch: int = 4

    @property
    def ndim(self) -> int:
        return len(self.size)

    @property
    def transposed(self) -> bool:
        return self.kind == "transposed"

    @property
    def output_size(self) -> tuple[int, ...]:
        return tuple(
            (i - 1) * s - 2 * p + d * (k - 1) + 1
            if self.transposed
            else (i + 2 * p - d * (k - 1) - 1) // s + 1
            for i, k, s, p, d in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    @property
    def flops(self) -> int:
        work = 2 * self.batch * self.out_channels * self.in_channels // self.groups
        met = self.size if self.transposed else self.output_size
        return work * math.prod(met) * math.prod(self.kernel)


def _layer(
    name: str,
    kind: str,
    size: tuple[int, ...],
    channels: tuple[int, int],
    kernel: int,
    stride: int = 1,
    padding: int = 1,
    groups: int = 1,
    batch: int = 4,
) -> Layer:
    """A layer that is the same along every dimension."""
    return Layer(
        name=name,
        kind=kind,
        size=size,
        in_channels=channels[0],
        out_channels=channels[1],
        kernel=(kernel,) * len(size),
        stride=(stride,) * len(size),
        padding=(padding,) * len(size),
        dilation=(1,) * len(size),
        groups=groups,
        batch=batch,
    )


LAYERS = (
    _layer("64 3x3 @56", "dense", (56, 56), (64, 64), 3),
    _layer("128 3x3 @28", "dense", (28, 28), (128, 128), 3),
    _layer("128 3x3 s2 @56", "dense", (56, 56), (128, 128), 3, stride=2),
    _layer("1024-256 1x1 @14", "dense", (14, 14), (1024, 256), 1, padding=0),
    _layer("144 dw 3x3 @56", "depthwise", (56, 56), (144, 144), 3, groups=144),
    _layer("256 3x3 g32 @28", "grouped", (28, 28), (256, 256), 3, groups=32),
    _layer("64 3x3x3 @8x28x28", "dense", (8, 28, 28), (64, 64), 3, batch=1),
    _layer("256 k3 @2048", "dense", (2048,), (256, 256), 3),
    _layer("64 pool 3x3 s2 @112", "pool", (112, 112), (64, 64), 3, stride=2),
    _layer("192 average 3x3 @35", "average", (35, 35), (192, 192), 3),
    _layer("128 average 2x2 s2 @56", "average", (56, 56), (128, 128), 2, stride=2, padding=0),
    _layer("2048 average 7x7 @7", "average", (7, 7), (2048, 2048), 7, stride=7, padding=0),
    # Upsampling of a U-Net, a DCGAN and a 3D V-Net: sizes of their inputs.
    _layer("128-64 up 2x2 s2 @28", "transposed", (28, 28), (128, 64), 2, stride=2, padding=0),
    _layer("256-128 up 4x4 s2 @14", "transposed", (14, 14), (256, 128), 4, stride=2),
    _layer("64-32 up 2x2x2 @4x14x14", "transposed", (4, 14, 14), (64, 32), 2, stride=2, padding=0),
)


@dataclass(frozen=True)
class Pair:
    """One operation on one layer in one layout: ours and PyTorch's, each a call that computes."""

    layer: Layer
    operation: str
    layout: str
    ours: Run
    peer: Run


def pairs(backend: CpuBackend, layer: Layer) -> Iterator[Pair]:
    """Every operation of a layer in both layouts, without forward passes of maxima."""
    own = {"pool": pooling_pairs, "average": pooling_pairs, "transposed": transposed_pairs}
    make = own.get(layer.kind, convolution_pairs)
    for last in (False, True):
        for pair in make(backend, layer, last):
            if pair.operation != "maxpool2d_fwd":
                yield pair


def convolution_pairs(
    backend: CpuBackend, layer: Layer, last: bool, *, forward: bool = False
) -> Iterator[Pair]:
    """Both gradients and, if asked for, the forward pass without a bias."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    x = draw(layer.batch, layer.in_channels, *layer.size)
    w = draw(layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
    y = draw(layer.batch, layer.out_channels, *layer.output_size)
    layout = (LAST if last else FIRST)[layer.ndim]
    own: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding}
    own |= {"dilation": layer.dilation, "groups": layer.groups, "layout": layout}
    given = [_laid(array, last) for array in (x, w, y)]
    theirs = [_tensor(array, last) for array in (y, x, w)]
    # A 1D layer in channels_last is one of height 1.
    flat = last and layer.ndim == 1
    stride = [1, *layer.stride] if flat else [*layer.stride]
    padding = [0, *layer.padding] if flat else [*layer.padding]
    dilation = [1, *layer.dilation] if flat else [*layer.dilation]
    steps = (None, stride, padding, dilation, False, [0] * len(stride), layer.groups)
    backward = torch.ops.aten.convolution_backward

    if forward:
        yield Pair(
            layer,
            "conv_fwd",
            layout,
            _ours(backend, "conv_fwd", {"input": given[0], "weight": given[1]}, own),
            lambda: torch.ops.aten.convolution(*theirs[1:], *steps),
        )
    yield Pair(
        layer,
        "conv_bwd_data",
        layout,
        _ours(
            backend,
            "conv_bwd_data",
            {"grad_output": given[2], "weight": given[1]},
            {**own, "input_size": layer.size},
        ),
        lambda: backward(*theirs, *steps, [True, False, False]),
    )
    yield Pair(
        layer,
        "grouped_conv_bwd_weight",
        layout,
        _ours(
            backend,
            "grouped_conv_bwd_weight",
            {"input": given[0], "grad_output": given[2]},
            {**own, "weight_size": layer.kernel},
        ),
        lambda: backward(*theirs, *steps, [False, True, False]),
    )


def transposed_pairs(backend: CpuBackend, layer: Layer, last: bool) -> Iterator[Pair]:
    """With a bias, as PyTorch's layers have by default."""
    rng = np.random.default_rng(0)
    shapes = {
        "grad_output": (layer.batch, layer.out_channels, *layer.output_size),
        "input": (layer.batch, layer.in_channels, *layer.size),
        "weight": (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel),
        "bias": (layer.out_channels,),
    }
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    given = {name: _laid(array, last and array.ndim > 1) for name, array in drawn.items()}
    y, x, w, b = (_tensor(array, last and array.ndim > 1) for array in drawn.values())
    layout = (LAST if last else FIRST)[layer.ndim]
    own = {"stride": layer.stride, "padding": layer.padding, "layout": layout}
    # A 1D layer in channels_last is one of height 1.
    flat = [1] if last and layer.ndim == 1 else []
    zeros = [0] * (len(flat) + layer.ndim)
    padding = [*zeros[: len(flat)], *layer.padding]
    window = [*flat, *layer.stride], padding, [*flat, *layer.dilation]
    steps = (*window, True, zeros, layer.groups)
    channels, every = [layer.out_channels], [True, True, True]
    forward = {name: given[name] for name in ("input", "weight", "bias")}
    backward = {name: given[name] for name in ("grad_output", "input", "weight")}
    aten = torch.ops.aten
    yield Pair(
        layer,
        "conv_transpose_fwd",
        layout,
        _ours(backend, "conv_transpose_fwd", forward, own),
        lambda: aten.convolution(x, w, b, *steps),
    )
    yield Pair(
        layer,
        "conv_transpose_backward",
        layout,
        _ours(backend, "conv_transpose_backward", backward, own),
        lambda: aten.convolution_backward(y, x, w, channels, *steps, every),
    )


def pooling_pairs(backend: CpuBackend, layer: Layer, last: bool) -> Iterator[Pair]:
    """Maxima or averages and their gradients; PyTorch computes one dimension as two as well.

    Its gradient of averages in channels last is timed though it is wrong: see `gpu_poolings`.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((layer.batch, layer.in_channels, *layer.size), np.float32)
    y = rng.standard_normal((layer.batch, layer.in_channels, *layer.output_size), np.float32)
    layout, ndim = (LAST if last else FIRST)[layer.ndim], layer.ndim
    kernel, stride, padding = [*layer.kernel], [*layer.stride], [*layer.padding]
    own: dict[str, Any] = {"kernel_size": layer.kernel, "stride": layer.stride}
    own |= {"padding": layer.padding, "layout": layout}
    their_x, their_y = _tensor(x, last), _tensor(y, last)
    if ndim == 1:
        if not last:
            their_x, their_y = their_x.unsqueeze(2), their_y.unsqueeze(2)
        kernel, stride, padding = [1, *kernel], [1, *stride], [0, *padding]
    aten, dims = torch.ops.aten, max(ndim, 2)
    given = _laid(x, last), _laid(y, last)
    if layer.kind == "average":
        window: tuple[Any, ...] = (kernel, stride, padding, False, True, None)
        forward, backward = (getattr(aten, f"avg_pool{dims}d{end}") for end in ("", "_backward"))
        yield Pair(
            layer,
            "avg_pool_fwd",
            layout,
            _ours(backend, "avg_pool_fwd", {"input": given[0]}, own),
            lambda: forward(their_x, *window),
        )
        yield Pair(
            layer,
            "avg_pool_bwd",
            layout,
            _ours(
                backend,
                "avg_pool_bwd",
                {"grad_output": given[1]},
                {**own, "input_size": layer.size},
            ),
            lambda: backward(their_y, their_x, *window),
        )
        return
    window = (kernel, stride, padding, [1] * dims, False)
    forward = getattr(aten, f"max_pool{dims}d_with_indices")
    backward = getattr(aten, f"max_pool{dims}d_with_indices_backward")
    indices = forward(their_x, *window)[1]
    ours = indices.squeeze(2) if ndim == 1 else indices
    yield Pair(
        layer,
        f"maxpool{ndim}d_fwd",
        layout,
        _ours(
            backend,
            f"maxpool{ndim}d_fwd",
            {"input": given[0]},
            {**own, "return_indices": True},
        ),
        lambda: forward(their_x, *window),
    )
    yield Pair(
        layer,
        f"maxpool{ndim}d_bwd",
        layout,
        _ours(
            backend,
            f"maxpool{ndim}d_bwd",
            {"grad_output": given[1], "indices": _laid(ours.numpy(), last)},
            {**own, "input_size": layer.size},
        ),
        lambda: backward(their_y, their_x, *window, indices),
    )


def _ours(
    backend: CpuBackend, operation: str, arrays: dict[str, Array], params: dict[str, Any]
) -> Run:
    request = validate(OPERATIONS[operation].request, {**arrays, **params})
    problem, tensors = problem_from(operation, request), request.tensors()
    return lambda: backend.run(problem, tensors)


def _laid(array: Array, last: bool) -> Array:
    return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if last else array


def _tensor(array: Array, last: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    if not last:
        return tensor
    if tensor.ndim == 3:
        tensor = tensor.unsqueeze(2)
    return tensor.contiguous(memory_format=MEMORY_FORMAT[tensor.ndim - 2])
