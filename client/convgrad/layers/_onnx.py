"""Parses and formats ONNX nodes, in the syntax of ONNX's parser or of its helper's printer.

``Y = Conv <group = 1, pads = [1, 1, 1, 1], strides = [2, 2]> (float[32,64,56,56] X,
float[64,64,3,3] W)``; the shapes may appear anywhere after the node.
"""

from __future__ import annotations

import re
from typing import Any

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.layers._layer import Layer, Sizes, per_dimension

__all__ = ["looks_like_onnx", "parse_onnx", "to_onnx"]

_NODE = re.compile(r"^\s*(?:[%\w.:/-]+\s*=\s*)?(Conv|ConvTranspose|MaxPool|AveragePool)\s*[<\[(]")
_LIST = re.compile(r"(\w+)\s*(?::\s*ints)?\s*=\s*\[\s*([\d\s,-]*)\]")
_SCALAR = re.compile(r"(\w+)\s*(?::\s*(?:int|string))?\s*=\s*(-?\d{1,12}|[\"']\w+[\"']|[A-Z_]+)")
_TYPED = re.compile(r"\b(float16|bfloat16|float|double)\s*\[\s*([\d\s,x]+?)\s*\]")
_BARE = re.compile(r"[%\w.]+\s*[:=]\s*\(?(\d{1,12}(?:\s*[x,]\s*\d{1,12}){2,4})\)?")
_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
_NAMES = {DType(name): short for short, name in _DTYPES.items()}
_KNOWN = {
    "auto_pad", "dilations", "group", "kernel_shape", "pads", "strides",
    "ceil_mode", "count_include_pad", "storage_order", "output_padding", "output_shape",
}  # fmt: skip
_KINDS = {
    "Conv": "conv",
    "ConvTranspose": "deconv",
    "MaxPool": "pool",
    "AveragePool": "avg_pool",
}


def looks_like_onnx(text: str) -> bool:
    """Return whether the text begins like one of the supported nodes."""
    return _NODE.match(text) is not None


def parse_onnx(text: str) -> Layer:
    """Parse a node with the shapes of its input and its weight.

    Raises
    ------
    MalformedRequest
        A shape is missing, or an attribute cannot be read or is not supported.
    """
    found = _NODE.match(text)
    if found is None:
        raise MalformedRequest(
            f"{text[:64]!r} is no Conv, ConvTranspose, MaxPool or AveragePool node"
        )
    name = found[1]
    kind: Any = _KINDS[name]
    attributes, rest = _attributes(text[found.end() - 1 :])
    shapes, dtype = _shapes(rest)
    pools = kind in ("pool", "avg_pool")
    wanted = 1 if pools else 2
    if len(shapes) < wanted:
        raise MalformedRequest(
            f"the {name} node comes with {len(shapes)} shapes; expected its input's and, but "
            "for poolings, its weight's, such as (float[32,64,56,56] X, float[64,64,3,3] W)"
        )
    input_shape = shapes[0]
    ndim = len(input_shape) - 2
    groups = attributes.get("group", 1)
    if pools:
        kernel = attributes.get("kernel_shape", ())
        out_channels = input_shape[1]
    else:
        kernel = shapes[1][2:]
        out_channels = shapes[1][0] if kind == "conv" else shapes[1][1] * groups
        _check_weight(name, kind, input_shape, shapes[1], groups, attributes)
    stride = per_dimension(attributes.get("strides", 1), ndim, "strides")
    dilation = per_dimension(attributes.get("dilations", 1), ndim, "dilations")
    if len(kernel) != ndim:
        raise MalformedRequest(f"the {name} node's kernel has {len(kernel)} sizes, not {ndim}")
    return Layer(
        kind=kind,
        batch=input_shape[0],
        in_channels=input_shape[1],
        out_channels=out_channels,
        groups=groups,
        input_size=input_shape[2:],
        kernel_size=tuple(kernel),
        stride=stride,
        padding=_padding(attributes, input_shape[2:], tuple(kernel), stride, dilation),
        dilation=dilation,
        output_padding=per_dimension(attributes.get("output_padding", 0), ndim, "output_padding"),
        ceil_mode=attributes.get("ceil_mode", 0) == 1,
        count_include_pad=kind != "avg_pool" or attributes.get("count_include_pad", 0) == 1,
        bias=len(shapes) > 2 and not pools,
        dtype=dtype,
    )


def to_onnx(layer: Layer) -> str:
    """Format a layer as a node with shapes; raise MalformedRequest if it cannot be expressed."""
    if layer.kind in ("separable", "adaptive_pool"):
        raise MalformedRequest("ONNX has no one node for such a layer")
    name = {kind: name for name, kind in _KINDS.items()}[layer.kind]
    before, after = zip(*layer.padding, strict=True)
    items = [f"dilations = {list(layer.dilation)}", f"kernel_shape = {list(layer.kernel_size)}"]
    if not layer.pools:
        items.insert(1, f"group = {layer.groups}")
    items += [f"pads = {[*before, *after]}", f"strides = {list(layer.stride)}"]
    if layer.kind == "deconv":
        items.append(f"output_padding = {list(layer.output_padding)}")
    if layer.ceil_mode:
        items.append("ceil_mode = 1")
    if layer.kind == "avg_pool" and layer.count_include_pad:
        items.append("count_include_pad = 1")
    dtype = _NAMES[layer.dtype or DType.FLOAT32]
    shapes = {"X": (layer.batch, layer.in_channels, *layer.input_size)}
    channels = layer.in_channels, layer.out_channels
    if layer.kind == "conv":
        shapes["W"] = (channels[1], channels[0] // layer.groups, *layer.kernel_size)
    elif layer.kind == "deconv":
        shapes["W"] = (channels[0], channels[1] // layer.groups, *layer.kernel_size)
    if layer.bias:
        shapes["B"] = (layer.out_channels,)
    typed = (f"{dtype}[{','.join(map(str, shape))}] {each}" for each, shape in shapes.items())
    return f"Y = {name} <{', '.join(items)}> ({', '.join(typed)})"


def _attributes(text: str) -> tuple[dict[str, Any], str]:
    """Return the attributes between the node's brackets, and the text after them."""
    if text[0] == "(":  # no attributes
        return {}, text
    closing = ">" if text[0] == "<" else "]"
    depth, end = 0, -1
    for at, letter in enumerate(text):
        depth += (letter in "<[") - (letter in ">]")
        if depth == 0 and letter == closing:
            end = at
            break
    if end < 0:
        raise MalformedRequest("the node's attributes do not end")
    inside = text[1:end]
    values: dict[str, Any] = {}
    for name, numbers in _LIST.findall(inside):
        values[name] = tuple(int(each) for each in re.findall(r"-?\d{1,12}", numbers))
    for name, value in _SCALAR.findall(_LIST.sub("", inside)):
        values[name] = int(value) if value.lstrip("-").isdigit() else value.strip("\"'")
    for name in values:
        if name not in _KNOWN:
            raise MalformedRequest(f"the node's attribute {name[:32]!r} is not computed here")
    return values, text[end + 1 :]


def _shapes(text: str) -> tuple[list[Sizes], DType | None]:
    typed = _TYPED.findall(text)
    if typed:
        found = [(DType(_DTYPES[name]), _numbers(sizes)) for name, sizes in typed]
        return [sizes for _, sizes in found], found[0][0]
    return [_numbers(sizes) for sizes in _BARE.findall(text)], None


def _numbers(text: str) -> Sizes:
    return tuple(int(each) for each in re.findall(r"\d{1,12}", text))


def _check_weight(
    name: str, kind: str, x: Sizes, w: Sizes, groups: int, attributes: dict[str, Any]
) -> None:
    if len(w) != len(x):
        raise MalformedRequest(
            f"the {name} node's input has {len(x)} dimensions, its weight {len(w)}"
        )
    taken = w[1] * groups if kind == "conv" else w[0]
    if taken != x[1]:
        raise MalformedRequest(
            f"the {name} node's weight takes {taken} channels, its input has {x[1]}"
        )
    stated = attributes.get("kernel_shape")
    if stated is not None and tuple(stated) != w[2:]:
        raise MalformedRequest(
            f"the {name} node's kernel_shape is {list(stated)}, its weight's {list(w[2:])}"
        )


def _padding(
    attributes: dict[str, Any], size: Sizes, kernel: Sizes, stride: Sizes, dilation: Sizes
) -> tuple[tuple[int, int], ...]:
    ndim = len(kernel)
    how = attributes.get("auto_pad", "NOTSET")
    if how in ("NOTSET", "VALID"):
        pads = attributes.get("pads", (0,) * 2 * ndim) if how == "NOTSET" else (0,) * 2 * ndim
        if len(pads) != 2 * ndim:
            raise MalformedRequest(f"the node's pads have {len(pads)} values; expected {2 * ndim}")
        return tuple(zip(pads[:ndim], pads[ndim:], strict=True))
    if how not in ("SAME_UPPER", "SAME_LOWER"):
        raise MalformedRequest(f"the node's auto_pad is {how[:32]!r}")
    found = []
    for i, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        total = max(0, (-(-i // s) - 1) * s + d * (k - 1) + 1 - i)
        small, large = total // 2, total - total // 2
        found.append((small, large) if how == "SAME_UPPER" else (large, small))
    return tuple(found)
