"""Tensor shapes and parameters of an operation's request for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from convgrad.errors import MalformedRequest
from convgrad.layers._layer import Layer, Sizes

__all__ = ["Arguments", "arguments", "operations_of"]

_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
_KERNEL = {1: "S", 2: "RS", 3: "TRS"}


class Arguments(NamedTuple):
    """The shapes of a request's tensors, in the order of its fields, and its parameters."""

    shapes: dict[str, Sizes]
    parameters: dict[str, Any]


def operations_of(layer: Layer) -> tuple[str, ...]:
    """Return the operations that apply to a layer."""
    if layer.pools:
        names = {
            "pool": (f"maxpool{layer.ndim}d", "max_unpool"),
            "avg_pool": ("avg_pool",),
            "adaptive_pool": ("adaptive_avg_pool", "adaptive_max_pool"),
        }[layer.kind]
        return tuple(f"{name}_{way}" for name in names for way in ("fwd", "bwd"))
    if layer.kind == "separable":
        return ("grouped_conv_conv_fwd",)
    if layer.kind == "deconv":
        transposed = (
            "conv_transpose_fwd",
            "conv_transpose_backward",
            "conv_transpose_double_backward",
        )
        return (*transposed, "conv3d_transpose") if layer.ndim == 3 else transposed
    plain = (
        "conv_fwd",
        "conv_bwd_data",
        "grouped_conv_bwd_weight",
        "conv_backward",
        "conv_double_backward",
    )
    return (*plain, "conv3d_backprop_input", "conv3d_transpose") if layer.ndim == 3 else plain


def arguments(operation: str, layer: Layer, layout: str | None = None) -> Arguments:
    """Return the tensor shapes and parameters of an operation's request for a layer.

    ``layout`` overrides the layer's own; the default is channels first.

    Raises
    ------
    MalformedRequest
        The operation does not apply to the layer, or the layout has the wrong rank.
    """
    possible = operations_of(layer)
    if operation not in possible:
        raise MalformedRequest(
            f"{operation} does not take {layer.title}; expected one of {', '.join(possible)}"
        )
    return _MAKERS[operation](layer, _Shapes.of(layer, layout or layer.layout))


class _Shapes:
    """Makes shapes in a layout; channel counts are totals over all groups."""

    def __init__(self, ndim: int, groups: int, layout: str | None) -> None:
        hw, rs = _SPATIAL[ndim], _KERNEL[ndim]
        weights = {
            f"NC{hw}": f"KC{rs}",
            f"N{hw}C": f"K{rs}C",
            f"NGC{hw}": f"GKC{rs}",
            f"N{hw}GC": f"GK{rs}C",
            f"GN{hw}C": f"GK{rs}C",
        }
        self.name = layout
        self.activations = layout or f"NC{hw}"
        if self.activations not in weights:
            raise MalformedRequest(
                f"layout is {self.activations[:32]!r}; expected one of {', '.join(weights)}"
            )
        self.weights = weights[self.activations]
        self._ndim, self._groups = ndim, groups

    @classmethod
    def of(cls, layer: Layer, layout: str | None) -> _Shapes:
        return cls(layer.ndim, layer.groups, layout)

    def activation(self, batch: int, channels: int, size: Sequence[int]) -> Sizes:
        grouped = "G" in self.activations
        sizes = {
            "N": batch,
            "G": self._groups,
            "C": channels // self._groups if grouped else channels,
            **dict(zip(_SPATIAL[self._ndim], size, strict=True)),
        }
        return tuple(sizes[letter] for letter in self.activations)

    def weight(
        self, out_channels: int, in_channels: int, kernel: Sequence[int], groups: int | None = None
    ) -> Sizes:
        """Return a weight's shape; ``groups`` overrides the layer's."""
        groups = groups or self._groups
        grouped = "G" in self.weights
        sizes = {
            "G": groups,
            "K": out_channels // groups if grouped else out_channels,
            "C": in_channels // groups,
            **dict(zip(_KERNEL[self._ndim], kernel, strict=True)),
        }
        return tuple(sizes[letter] for letter in self.weights)

    def parameters(self, layer: Layer) -> dict[str, Any]:
        named = {} if self.name is None else {"layout": self.name}
        return {**layer.geometry(), "groups": layer.groups, **named}


def _input(layer: Layer, shapes: _Shapes) -> Sizes:
    return shapes.activation(layer.batch, layer.in_channels, layer.input_size)


def _output(layer: Layer, shapes: _Shapes) -> Sizes:
    return shapes.activation(layer.batch, layer.out_channels, layer.output_size)


def _weight(layer: Layer, shapes: _Shapes) -> Sizes:
    return shapes.weight(layer.out_channels, layer.in_channels, layer.kernel_size)


def _bias(layer: Layer) -> dict[str, Sizes]:
    return {"bias": (layer.out_channels,)} if layer.bias else {}


def _conv_fwd(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors = {"input": _input(layer, shapes), "weight": _weight(layer, shapes), **_bias(layer)}
    return Arguments(tensors, shapes.parameters(layer))


def _conv_bwd_data(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors = {"grad_output": _output(layer, shapes), "weight": _weight(layer, shapes)}
    size = {"input_size": list(layer.input_size)}
    return Arguments(tensors, {**shapes.parameters(layer), **size})


def _bwd_weight(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors = {"input": _input(layer, shapes), "grad_output": _output(layer, shapes)}
    more: dict[str, Any] = {"weight_size": list(layer.kernel_size)}
    if layer.bias:
        more["outputs"] = ["grad_weight", "grad_bias"]
    return Arguments(tensors, {**shapes.parameters(layer), **more})


def _conv_backward(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors = {
        "grad_output": _output(layer, shapes),
        "input": _input(layer, shapes),
        "weight": _weight(layer, shapes),
    }
    wanted = ["grad_input", "grad_weight", *(["grad_bias"] if layer.bias else [])]
    return Arguments(tensors, {**shapes.parameters(layer), "outputs": wanted})


def _conv3d_backprop_input(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors, parameters = _conv_bwd_data(layer, shapes)
    layout = parameters.pop("layout", None)
    if layout is not None:
        if "G" in layout:
            raise MalformedRequest("conv3d_backprop_input takes the layouts NCDHW and NDHWC")
        for name in ("grad_output_format", "weight_format", "output_format"):
            parameters[name] = layout
    return Arguments(tensors, parameters)


def _conv3d_transpose(layer: Layer, shapes: _Shapes) -> Arguments:
    if layer.kind == "deconv":
        return _conv_transpose_fwd(layer, shapes)
    tensors = {"input": _output(layer, shapes), "weight": _weight(layer, shapes)}
    more = {"output_padding": [_left_over(layer, axis) for axis in range(layer.ndim)]}
    return Arguments(tensors, {**shapes.parameters(layer), **more})


def _conv_transpose_fwd(layer: Layer, shapes: _Shapes) -> Arguments:
    weight = shapes.weight(layer.in_channels, layer.out_channels, layer.kernel_size)
    tensors = {"input": _input(layer, shapes), "weight": weight, **_bias(layer)}
    more = {"output_padding": list(layer.output_padding)}
    return Arguments(tensors, {**shapes.parameters(layer), **more})


def _conv_transpose_backward(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors, parameters = _conv_transpose_fwd(layer, shapes)
    tensors.pop("bias", None)
    wanted = ["grad_input", "grad_weight", *(["grad_bias"] if layer.bias else [])]
    return Arguments(
        {"grad_output": _output(layer, shapes), **tensors}, {**parameters, "outputs": wanted}
    )


def _double_backward(layer: Layer, shapes: _Shapes) -> Arguments:
    make = _conv_transpose_backward if layer.kind == "deconv" else _conv_backward
    tensors, parameters = make(layer, shapes)
    del parameters["outputs"]
    more = {
        "grad_grad_input": tensors["input"],
        "grad_grad_weight": tensors["weight"],
        **({"grad_grad_bias": (layer.out_channels,)} if layer.bias else {}),
    }
    return Arguments({**tensors, **more}, parameters)


def _left_over(layer: Layer, axis: int) -> int:
    """Return the number of input rows after the last window."""
    reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
    covered = (layer.output_size[axis] - 1) * layer.stride[axis] + reach
    return layer.input_size[axis] + sum(layer.padding[axis]) - covered


def _separable(layer: Layer, shapes: _Shapes) -> Arguments:
    channels, ones = layer.in_channels, (1,) * layer.ndim
    tensors = {
        "input": _input(layer, shapes),
        "weight0": shapes.weight(channels, channels, layer.kernel_size, groups=channels),
        "weight1": shapes.weight(layer.out_channels, channels, ones, groups=1),
    }
    named = {} if shapes.name is None else {"layout": shapes.name}
    return Arguments(tensors, {"conv0": {**layer.geometry(), "groups": channels}, **named})


def _pool(layer: Layer, shapes: _Shapes) -> dict[str, Any]:
    parameters = shapes.parameters(layer)
    del parameters["groups"]
    size = {"kernel_size": list(layer.kernel_size)}
    return {**size, **parameters, **({"ceil_mode": True} if layer.ceil_mode else {})}


def _pool_fwd(layer: Layer, shapes: _Shapes) -> Arguments:
    return Arguments({"input": _input(layer, shapes)}, _pool(layer, shapes))


def _pool_bwd(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors = {"grad_output": _output(layer, shapes), "input": _input(layer, shapes)}
    return Arguments(tensors, _pool(layer, shapes))


def _layout(shapes: _Shapes) -> dict[str, Any]:
    return {} if shapes.name is None else {"layout": shapes.name}


def _avg_pool(layer: Layer, shapes: _Shapes) -> dict[str, Any]:
    if set(layer.dilation) != {1}:
        raise MalformedRequest("average pooling takes no dilation")
    parameters = _pool(layer, shapes)
    del parameters["dilation"]
    return {**parameters, **({} if layer.count_include_pad else {"count_include_pad": False})}


def _avg_pool_fwd(layer: Layer, shapes: _Shapes) -> Arguments:
    return Arguments({"input": _input(layer, shapes)}, _avg_pool(layer, shapes))


def _avg_pool_bwd(layer: Layer, shapes: _Shapes) -> Arguments:
    size = {"input_size": list(layer.input_size)}
    return Arguments({"grad_output": _output(layer, shapes)}, {**_avg_pool(layer, shapes), **size})


def _adaptive_fwd(layer: Layer, shapes: _Shapes) -> Arguments:
    size = {"output_size": list(layer.output_size)}
    return Arguments({"input": _input(layer, shapes)}, {**size, **_layout(shapes)})


def _adaptive_avg_bwd(layer: Layer, shapes: _Shapes) -> Arguments:
    size = {"input_size": list(layer.input_size)}
    return Arguments({"grad_output": _output(layer, shapes)}, {**size, **_layout(shapes)})


def _adaptive_max_bwd(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors = {"grad_output": _output(layer, shapes), "input": _input(layer, shapes)}
    return Arguments(tensors, _layout(shapes))


def _unpool_fwd(layer: Layer, shapes: _Shapes) -> Arguments:
    """Unpooling that inverts the layer: the pooling's output is the unpooling's input."""
    padding = [before for before, _ in layer.padding]
    if any(before != after for before, after in layer.padding):
        raise MalformedRequest("max unpooling takes the same padding on both sides")
    pooled = _output(layer, shapes)
    parameters = {
        "kernel_size": list(layer.kernel_size),
        "stride": list(layer.stride),
        "padding": padding,
        "output_size": list(layer.input_size),
    }
    return Arguments({"input": pooled, "indices": pooled}, {**parameters, **_layout(shapes)})


def _unpool_bwd(layer: Layer, shapes: _Shapes) -> Arguments:
    tensors = {"grad_output": _input(layer, shapes), "indices": _output(layer, shapes)}
    return Arguments(tensors, _layout(shapes))


_MAKERS: Mapping[str, Callable[[Layer, _Shapes], Arguments]] = {
    "conv_fwd": _conv_fwd,
    "conv_bwd_data": _conv_bwd_data,
    "grouped_conv_bwd_weight": _bwd_weight,
    "conv_backward": _conv_backward,
    "conv3d_backprop_input": _conv3d_backprop_input,
    "conv3d_transpose": _conv3d_transpose,
    "conv_transpose_fwd": _conv_transpose_fwd,
    "conv_transpose_backward": _conv_transpose_backward,
    "conv_double_backward": _double_backward,
    "conv_transpose_double_backward": _double_backward,
    "grouped_conv_conv_fwd": _separable,
    **{f"maxpool{ndim}d_fwd": _pool_fwd for ndim in (1, 2, 3)},
    **{f"maxpool{ndim}d_bwd": _pool_bwd for ndim in (1, 2, 3)},
    "max_unpool_fwd": _unpool_fwd,
    "max_unpool_bwd": _unpool_bwd,
    "avg_pool_fwd": _avg_pool_fwd,
    "avg_pool_bwd": _avg_pool_bwd,
    "adaptive_avg_pool_fwd": _adaptive_fwd,
    "adaptive_max_pool_fwd": _adaptive_fwd,
    "adaptive_avg_pool_bwd": _adaptive_avg_bwd,
    "adaptive_max_pool_bwd": _adaptive_max_bwd,
}
