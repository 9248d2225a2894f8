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

_NODE = re.compile(
    r"^\s*(?:[%\w.:/-]+\s*=\s*)?(Conv|ConvTranspose|MaxPool|AveragePool|"
    r"GlobalAveragePool|GlobalMaxPool)\s*[<\[(]"
)
_LIST = re.compile(r"(\w+)\s*(?::\s*ints)?\s*=\s*\[\s*([\d\s,-]*)\]")
_SCALAR = re.compile(r"(\w+)\s*(?::\s*(?:int|string))?\s*=\s*(-?\d{1,12}|[\"']\w+[\"']|[A-Z_]+)")
_TYPED = re.compile(r"\b(float16|bfloat16|float|double)\s*\[\s*([\d\s,x]+?)\s*\]")
_BARE = re.compile(r"[%\w.]+\s*[:=]\s*\(?(\d{1,12}(?:\s*[x,]\s*\d{1,12}){2,4})\)?")
_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
_NAMES = {DType(name): short for short, name in _DTYPES.items()}
_KNOWN = {
    "auto_pad": str,
    **dict.fromkeys(("group", "ceil_mode", "count_include_pad", "storage_order"), int),
    **dict.fromkeys(
        ("dilations", "kernel_shape", "pads", "strides", "output_padding", "output_shape"), tuple
    ),
}
"""The attributes and their types."""
_KINDS = {
    "Conv": "conv",
    "ConvTranspose": "deconv",
    "MaxPool": "pool",
    "AveragePool": "avg_pool",
    "GlobalAveragePool": "adaptive_pool",
    "GlobalMaxPool": "adaptive_pool",
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
        raise MalformedRequest(f"{text[:64]!r} is not one of the nodes {', '.join(_KINDS)}")
    name = found[1]
    kind: Any = _KINDS[name]
    attributes, rest = _attributes(text[found.end() - 1 :])
    shapes, dtype = _shapes(rest)
    pools = kind in ("pool", "avg_pool", "adaptive_pool")
    wanted = 1 if pools else 2
    if len(shapes) < wanted:
        raise MalformedRequest(
            f"the {name} node comes with {len(shapes)} shapes of numbers; expected its input's "
            "and, except for poolings, its weight's, such as (float[32,64,56,56] X, "
            "float[64,64,3,3] W)"
        )
    input_shape = shapes[0]
    if not 3 <= len(input_shape) <= 5:
        raise MalformedRequest(
            f"the {name} node's input has {len(input_shape)} dimensions; expected 3 to 5"
        )
    if kind == "adaptive_pool":
        return _global_pool(name, input_shape, dtype)
    ndim = len(input_shape) - 2
    groups = attributes.get("group", 1)
    if pools:
        kernel = attributes.get("kernel_shape", ())
        out_channels = input_shape[1]
    else:
        _check_weight(name, kind, input_shape, shapes[1], groups, attributes)
        kernel = shapes[1][2:]
        out_channels = shapes[1][0] if kind == "conv" else shapes[1][1] * groups
    stride = per_dimension(attributes.get("strides", 1), ndim, "strides")
    dilation = per_dimension(attributes.get("dilations", 1), ndim, "dilations")
    if len(kernel) != ndim:
        raise MalformedRequest(f"the {name} node's kernel has {len(kernel)} sizes, not {ndim}")
    more = per_dimension(attributes.get("output_padding", 0), ndim, "output_padding")
    reach = tuple(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    pad = _transposed_padding if kind == "deconv" else _padding
    padding, more = pad(attributes, input_shape[2:], reach, stride, more)
    return Layer(
        kind=kind,
        batch=input_shape[0],
        in_channels=input_shape[1],
        out_channels=out_channels,
        groups=groups,
        input_size=input_shape[2:],
        kernel_size=tuple(kernel),
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=more,
        ceil_mode=attributes.get("ceil_mode", 0) == 1,
        count_include_pad=kind != "avg_pool" or attributes.get("count_include_pad", 0) == 1,
        bias=len(shapes) > 2 and not pools,
        dtype=dtype,
    )


def _global_pool(name: str, shape: Sizes, dtype: DType | None) -> Layer:
    """Return an adaptive pooling to a size of 1."""
    return Layer(
        kind="adaptive_pool",
        batch=shape[0],
        in_channels=shape[1],
        out_channels=shape[1],
        input_size=shape[2:],
        adaptive_size=(1,) * (len(shape) - 2),
        kernel_size=(),
        stride=(),
        padding=(),
        dilation=(),
        operation=f"adaptive_{'max' if name == 'GlobalMaxPool' else 'avg'}_pool_fwd",
        dtype=dtype,
    )


def to_onnx(layer: Layer) -> str:
    """Format a layer as a node with shapes; raise MalformedRequest if it cannot be expressed."""
    dtype = _NAMES[layer.dtype or DType.FLOAT32]
    if layer.kind == "separable" or any(size != 1 for size in layer.adaptive_size):
        raise MalformedRequest("no single ONNX node computes such a layer")
    if layer.kind == "adaptive_pool":
        name = "Max" if layer.operation == "adaptive_max_pool_fwd" else "Average"
        sizes = ",".join(map(str, (layer.batch, layer.in_channels, *layer.input_size)))
        return f"Y = Global{name}Pool ({dtype}[{sizes}] X)"
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
    for name, value in values.items():
        if name not in _KNOWN:
            raise MalformedRequest(f"the node's attribute {name[:32]!r} is not supported")
        if not isinstance(value, _KNOWN[name]):
            raise MalformedRequest(f"the node's attribute {name} cannot be {repr(value)[:32]}")
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


_Padding = tuple[tuple[tuple[int, int], ...], Sizes]


def _padding(
    attributes: dict[str, Any], size: Sizes, reach: Sizes, stride: Sizes, more: Sizes
) -> _Padding:
    """Return the padding of a convolution or pooling, and its output_padding unchanged."""
    how = _auto_pad(attributes)
    if how is None:
        return _stated_padding(attributes, len(size)), more
    totals = [
        max(0, (-(-i // s) - 1) * s + r - i) for i, s, r in zip(size, stride, reach, strict=True)
    ]
    return tuple(_halves(total, upper=how == "SAME_UPPER") for total in totals), more


def _transposed_padding(
    attributes: dict[str, Any], size: Sizes, reach: Sizes, stride: Sizes, more: Sizes
) -> _Padding:
    """Return the padding and output_padding of a ConvTranspose, from output_shape if it has one."""
    how, stated = _auto_pad(attributes), attributes.get("output_shape")
    if how is None and stated is None:
        return _stated_padding(attributes, len(size)), more
    wanted = tuple(i * s for i, s in zip(size, stride, strict=True))
    if stated is not None:
        wanted = per_dimension(tuple(stated)[-len(size) :], len(size), "output_shape")
    rows = zip(size, stride, reach, more, wanted, strict=True)
    totals = [(i - 1) * s + r + extra - out for i, s, r, extra, out in rows]
    if any(-total >= s for total, s in zip(totals, stride, strict=True)):
        raise MalformedRequest(f"the node's output_shape {list(wanted)} is too large")
    # What is missing of the output is added after it.
    more = tuple(extra + max(0, -total) for extra, total in zip(more, totals, strict=True))
    return tuple(_halves(max(0, total), upper=how == "SAME_UPPER") for total in totals), more


def _auto_pad(attributes: dict[str, Any]) -> str | None:
    """Return SAME_UPPER or SAME_LOWER; None if the padding is stated, or zero for VALID."""
    how = str(attributes.get("auto_pad", "NOTSET"))
    if how in ("SAME_UPPER", "SAME_LOWER"):
        return how
    if how not in ("NOTSET", "VALID"):
        raise MalformedRequest(f"the node's auto_pad is {how[:32]!r}")
    return None


def _stated_padding(attributes: dict[str, Any], ndim: int) -> tuple[tuple[int, int], ...]:
    pads: Sizes = (0,) * 2 * ndim
    if attributes.get("auto_pad") != "VALID":
        pads = attributes.get("pads", pads)
    if len(pads) != 2 * ndim:
        raise MalformedRequest(f"the node's pads have {len(pads)} values; expected {2 * ndim}")
    return tuple(zip(pads[:ndim], pads[ndim:], strict=True))


def _halves(total: int, *, upper: bool) -> tuple[int, int]:
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)
