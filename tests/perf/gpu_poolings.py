"""Average, adaptive and max pooling and max unpooling, as problems and as PyTorch's operators.

Layers are those of ``suite/poolings.json``; each has its forward and its gradient. Gradients of
maxima start from the same indices on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from convgrad.contract import OPERATIONS, validate
from convgrad.dtypes import DType
from convgrad_service.problems import Problem, problem_from

__all__ = ["KINDS", "Tensors", "operations_of", "peer_of", "problem_of", "tensors_of"]

ATEN = torch.ops.aten
Layer = Mapping[str, Any]
Tensors = Mapping[str, Any]
KINDS = ("avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "max_unpool")
_LAYOUTS = {1: ("NCW", "NWC"), 2: ("NCHW", "NHWC"), 3: ("NCDHW", "NDHWC")}
_NOT_PARAMETERS = ("name", "class", "kind", "ndim", "N", "C", "input_size")


def operations_of(layer: Layer) -> tuple[str, str]:
    """Forward and backward."""
    name = layer["kind"] if layer["kind"] in KINDS else f"maxpool{layer['ndim']}d"
    return f"{name}_fwd", f"{name}_bwd"


def problem_of(layer: Layer, dtype: str, layout: str, op: str) -> Problem:
    """A layer's problem, from a request whose tensors take no memory."""
    last = layout == "NHWC"
    given = _parameters(layer) | {"layout": _LAYOUTS[layer["ndim"]][last]}
    size, out = tuple(layer["input_size"]), _output_size(layer)
    backward = op.endswith("bwd")

    def blank(spatial: tuple[int, ...], kind: str = dtype) -> Any:
        shape = (layer["N"], *spatial, layer["C"]) if last else (layer["N"], layer["C"], *spatial)
        return np.broadcast_to(np.empty((), DType(kind).numpy), shape)

    if layer["kind"] == "max_unpool":
        given |= {"indices": blank(size, "int64")}
        if backward:
            given = {name: given[name] for name in ("indices", "layout")}
    elif layer["kind"] not in ("avg_pool", "adaptive_avg_pool"):
        given |= {"indices": blank(out, "int64")} if backward else {"return_indices": True}
    if backward:
        given |= {"grad_output": blank(out)}
        if layer["kind"] != "max_unpool":
            given |= {"input_size": size}
        given.pop("output_size", None)
    else:
        given |= {"input": blank(size)}
    return problem_from(op, validate(OPERATIONS[op].request, given))


def tensors_of(layer: Layer, problem: Problem, layout: str) -> dict[str, Any]:
    """Random ones; indices are those of a pooling."""
    found = {
        name: torch.randn(spec.shape, device="cuda").to(getattr(torch, str(spec.dtype)))
        for name, spec in problem.inputs.items()
        if name != "indices"
    }
    if "indices" in problem.inputs:
        indices = _indices(layer)
        found["indices"] = _stored(indices, layout == "NHWC")
    return found


def peer_of(layer: Layer, layout: str, op: str) -> Callable[[Tensors], Any]:
    """PyTorch's operator, on the same tensors."""
    last, backward = layout == "NHWC", op.endswith("bwd")
    make = _PEERS[layer["kind"]]
    run = make(layer, backward)

    def peer(given: Tensors) -> Any:
        results = run({name: _viewed(tensor, last) for name, tensor in given.items()})
        if isinstance(results, tuple):
            return [_stored_view(result, last) for result in results]
        return _stored_view(results, last)

    return peer


def _parameters(layer: Layer) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in _NOT_PARAMETERS}


def _per_dimension(value: Any, ndim: int) -> list[int]:
    return [value] * ndim if isinstance(value, int) else list(value)


def _window(layer: Layer) -> tuple[list[int], list[int], list[int]]:
    """Kernel, stride and padding."""
    ndim = layer["ndim"]
    kernel = _per_dimension(layer["kernel_size"], ndim)
    stride = _per_dimension(layer.get("stride", kernel), ndim)
    return kernel, stride, _per_dimension(layer.get("padding", 0), ndim)


def _output_size(layer: Layer) -> tuple[int, ...]:
    if "output_size" in layer:
        return tuple(_per_dimension(layer["output_size"], layer["ndim"]))
    sides = zip(layer["input_size"], *_window(layer), strict=True)
    if layer["kind"] == "max_unpool":
        return tuple((n - 1) * s - 2 * p + k for n, k, s, p in sides)
    return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sides)


def _viewed(tensor: Any, last: bool) -> Any:
    """In PyTorch's order of dimensions."""
    return tensor.movedim(-1, 1) if last else tensor


def _stored_view(tensor: Any, last: bool) -> Any:
    return tensor.movedim(1, -1) if last else tensor


def _stored(tensor: Any, last: bool) -> Any:
    return _stored_view(tensor, last).contiguous()


def _indices(layer: Layer) -> Any:
    """Of the maxima of a random input, channels first."""
    shape = layer["N"], layer["C"]
    if layer["kind"] == "max_unpool":
        planes = torch.randn((*shape, *_output_size(layer)), device="cuda")
        return functional.max_pool2d(planes, *_window(layer), return_indices=True)[1]
    planes = torch.randn((*shape, *layer["input_size"]), device="cuda")
    if layer["kind"] == "adaptive_max_pool":
        return ATEN.adaptive_max_pool2d(planes, list(_output_size(layer)))[1]
    pool = getattr(functional, f"max_pool{layer['ndim']}d")
    return pool(planes, *_window(layer), return_indices=True)[1]


def _average(layer: Layer, backward: bool) -> Callable[[Tensors], Any]:
    ndim = layer["ndim"]
    rest = False, layer.get("count_include_pad", True), None
    size = layer["N"], layer["C"], *layer["input_size"]
    window: Any = _window(layer)
    if ndim == 1:  # as PyTorch computes it: a row of a plane
        window = tuple([one, value[0]] for one, value in zip((1, 1, 0), window, strict=True))
    run = getattr(ATEN, f"avg_pool{max(ndim, 2)}d")
    run_backward = getattr(ATEN, f"avg_pool{max(ndim, 2)}d_backward")

    def lifted(tensor: Any) -> Any:
        return tensor.unsqueeze(2) if ndim == 1 else tensor

    def peer(given: Tensors) -> Any:
        if backward:
            grad = given["grad_output"]
            if grad.dtype is torch.float64:  # the reference: channels last, PyTorch's is wrong
                grad = grad.contiguous()
            x = _like(grad, size)
            found = run_backward(lifted(grad), lifted(x), *window, *rest)
        else:
            found = run(lifted(given["input"]), *window, *rest)
        return found.squeeze(2) if ndim == 1 else found

    return peer


def _like(grad: Any, size: tuple[int, ...]) -> Any:
    """A tensor of the input's size in the gradient's memory format; nobody reads its elements."""
    last = grad.dim() > 3 and grad.stride(1) == 1 and grad.shape[1] > 1
    kept = _KEPT.get((size, grad.dtype, last))
    if kept is None:
        kept = torch.empty(size, dtype=grad.dtype, device="cuda")
        if last:
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            kept = kept.to(memory_format=formats[grad.dim()])
        _KEPT.clear()
        _KEPT[size, grad.dtype, last] = kept
    return kept


_KEPT: dict[Any, Any] = {}


def _adaptive_average(layer: Layer, backward: bool) -> Callable[[Tensors], Any]:
    ndim, out = layer["ndim"], list(_output_size(layer))
    size = layer["N"], layer["C"], *layer["input_size"]
    run = getattr(functional, f"adaptive_avg_pool{ndim}d")
    run_backward = getattr(ATEN, f"_adaptive_avg_pool{ndim}d_backward")
    positions = int(np.prod(layer["input_size"]))

    def peer(given: Tensors) -> Any:
        if not backward:
            return run(given["input"], out)
        grad = given["grad_output"]
        if all(extent == 1 for extent in out):
            return grad.expand(size) / positions  # autograd's, since the forward is a mean
        return run_backward(grad, _like(grad, size))

    return peer


def _adaptive_max(layer: Layer, backward: bool) -> Callable[[Tensors], Any]:
    out = list(_output_size(layer))
    size = layer["N"], layer["C"], *layer["input_size"]

    def peer(given: Tensors) -> Any:
        if not backward:
            return ATEN.adaptive_max_pool2d(given["input"], out)
        grad = given["grad_output"]
        indices = given["indices"].long()
        return ATEN.adaptive_max_pool2d_backward(grad, _like(grad, size), indices)

    return peer


def _unpool(layer: Layer, backward: bool) -> Callable[[Tensors], Any]:
    out = list(_output_size(layer))

    def peer(given: Tensors) -> Any:
        indices = given["indices"].long()
        if not backward:
            return ATEN.max_unpool2d(given["input"], indices, out)
        found = given["grad_output"].flatten(2).gather(2, indices.flatten(2))
        return found.view(indices.shape)

    return peer


def _max(layer: Layer, backward: bool) -> Callable[[Tensors], Any]:
    ndim = layer["ndim"]
    kernel, stride, padding = _window(layer)
    if ndim == 1:  # as PyTorch computes it: a row of a plane
        kernel, stride, padding = ([1, *kernel], [1, *stride], [0, *padding])
    dilation = [1] * max(ndim, 2)
    size = layer["N"], layer["C"], *layer["input_size"]
    run = getattr(ATEN, f"max_pool{max(ndim, 2)}d_with_indices")
    run_backward = getattr(ATEN, f"max_pool{max(ndim, 2)}d_with_indices_backward")

    def lifted(tensor: Any) -> Any:
        return tensor.unsqueeze(2) if ndim == 1 else tensor

    def lowered(tensor: Any) -> Any:
        return tensor.squeeze(2) if ndim == 1 else tensor

    def peer(given: Tensors) -> Any:
        if not backward:
            found = run(lifted(given["input"]), kernel, stride, padding)
            return tuple(map(lowered, found))
        grad, x = given["grad_output"], _like(given["grad_output"], size)
        indices = lifted(given["indices"].long())
        window = kernel, stride, padding, dilation, False
        return lowered(run_backward(lifted(grad), lifted(x), *window, indices))

    return peer


_PEERS: Mapping[str, Callable[[Layer, bool], Callable[[Tensors], Any]]] = {
    "avg_pool": _average,
    "adaptive_avg_pool": _adaptive_average,
    "adaptive_max_pool": _adaptive_max,
    "max_unpool": _unpool,
    "maxpool": _max,
}
