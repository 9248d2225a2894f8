"""Parses and formats the repr of PyTorch modules, followed by the shape of the input.

``Conv2d(64, 256, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)) on 32x64x56x56``
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.layers._layer import Layer, pairs, per_dimension

__all__ = ["looks_like_torch", "parse_torch", "to_torch"]

_MODULE = re.compile(
    # A module inside another one is printed with its name: (conv1): Conv2d(…).
    r"^(?:\([\w.]{1,64}\):\s*)?(?:torch\.nn\.|nn\.)?(Conv|ConvTranspose|"
    r"MaxPool|MaxUnpool|AvgPool|AdaptiveAvgPool|AdaptiveMaxPool)([123])d\((.*?)\)\s*"
    r"(?:(?:on|input|@)[\s=:]*(.+))?$",
    re.DOTALL,
)
_NUMBER = re.compile(r"\d{1,12}")
_KINDS = {
    "Conv": "conv",
    "ConvTranspose": "deconv",
    "MaxPool": "pool",
    "MaxUnpool": "pool",
    "AvgPool": "avg_pool",
    "AdaptiveAvgPool": "adaptive_pool",
    "AdaptiveMaxPool": "adaptive_pool",
}
_POSITIONAL = {
    "conv": ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation",
             "groups", "bias", "padding_mode"),
    "deconv": ("in_channels", "out_channels", "kernel_size", "stride", "padding",
               "output_padding", "groups", "bias", "dilation", "padding_mode"),
    "pool": ("kernel_size", "stride", "padding", "dilation", "return_indices", "ceil_mode"),
    "avg_pool": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad",
                 "divisor_override"),
    "adaptive_pool": ("output_size", "return_indices"),
}  # fmt: skip


def looks_like_torch(text: str) -> bool:
    """Return whether the text begins like one of the supported modules."""
    return _MODULE.match(text.strip()) is not None


def parse_torch(text: str) -> Layer:
    """Parse a module's repr and the shape of its input.

    Raises
    ------
    MalformedRequest
        The input's shape is missing, or an argument cannot be read or is not supported.
    """
    found = _MODULE.match(text.strip())
    if found is None:
        raise MalformedRequest(
            f"{text[:64]!r} is not a module; expected Conv2d(64, 64, kernel_size=(3, 3), …) on "
            "NxCxHxW"
        )
    name, ndim, shape = found[1], int(found[2]), found[4]
    kind: Any = _KINDS[name]
    values = _arguments(found[3], kind)
    if shape is None:
        raise MalformedRequest(
            f"{name}{ndim}d does not say the input's shape; add it: {name}{ndim}d(…) on "
            f"32x{values.get('in_channels', 64)}x{'x'.join(['56'] * ndim)}"
        )
    sizes = tuple(int(number) for number in _NUMBER.findall(shape))
    if len(sizes) != ndim + 2:
        raise MalformedRequest(
            f"the input's shape {shape[:64]!r} has {len(sizes)} numbers; expected N, C and {ndim} "
            "spatial ones"
        )
    channels = values.get("in_channels", sizes[1])
    if channels != sizes[1]:
        raise MalformedRequest(
            f"the module takes {channels} channels and the input's shape has {sizes[1]}"
        )
    if values.get("padding_mode", "zeros") != "zeros":
        raise MalformedRequest(f"padding_mode {values['padding_mode']!r}; expected 'zeros'")
    if kind == "adaptive_pool":
        return _adaptive(name, values, sizes)
    if values.get("divisor_override") is not None:
        raise MalformedRequest("give divisor_override as a field of the request, not in the layer")
    if "kernel_size" not in values:
        raise MalformedRequest(f"{name}{ndim}d does not say its kernel_size")
    kernel = per_dimension(values["kernel_size"], ndim, "kernel_size")
    pools = kind in ("pool", "avg_pool")
    default = kernel if pools else 1
    stated = values.get("stride")
    stride = per_dimension(default if stated is None else stated, ndim, "stride")
    dilation = per_dimension(values.get("dilation", 1), ndim, "dilation")
    padding = _padding(values.get("padding", 0), kernel, dilation)
    input_size = sizes[2:]
    if name == "MaxUnpool":  # described by the pooling that it inverts
        input_size = tuple(
            (size - 1) * s + k - sum(pads)
            for size, s, k, pads in zip(input_size, stride, kernel, padding, strict=True)
        )
    return Layer(
        kind=kind,
        batch=sizes[0],
        in_channels=channels,
        out_channels=values.get("out_channels", channels),
        groups=values.get("groups", 1),
        input_size=input_size,
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=per_dimension(values.get("output_padding", 0), ndim, "output_padding"),
        ceil_mode=bool(values.get("ceil_mode", False)),
        count_include_pad=bool(values.get("count_include_pad", True)),
        bias=not pools and bool(values.get("bias", True)),
    )


def _adaptive(name: str, values: dict[str, Any], sizes: tuple[int, ...]) -> Layer:
    ndim = len(sizes) - 2
    if "output_size" not in values:
        raise MalformedRequest(f"{name}{ndim}d does not say its output_size")
    asked = values["output_size"]
    each = asked if isinstance(asked, tuple | list) else (asked,) * ndim
    if len(each) != ndim:
        raise MalformedRequest(f"output_size has {len(each)} values; expected {ndim}")
    # None is the input's own size.
    wanted = tuple(size if one is None else one for one, size in zip(each, sizes[2:], strict=True))
    return Layer(
        kind="adaptive_pool",
        batch=sizes[0],
        in_channels=sizes[1],
        out_channels=sizes[1],
        input_size=sizes[2:],
        adaptive_size=wanted,
        kernel_size=(),
        stride=(),
        padding=(),
        dilation=(),
        operation=f"adaptive_{'avg' if name == 'AdaptiveAvgPool' else 'max'}_pool_fwd",
    )


def to_torch(layer: Layer) -> str:
    """Format a layer as a module's repr; raise MalformedRequest if it cannot be expressed."""
    if layer.kind == "separable" or any(a != b for a, b in layer.padding):
        raise MalformedRequest("no single PyTorch module computes such a layer")
    shape = "x".join(map(str, (layer.batch, layer.in_channels, *layer.input_size)))
    if layer.kind == "adaptive_pool":
        name = "Max" if layer.operation == "adaptive_max_pool_fwd" else "Avg"
        return f"Adaptive{name}Pool{layer.ndim}d(output_size={layer.adaptive_size!r}) on {shape}"
    name = {kind: name for name, kind in reversed(_KINDS.items())}[layer.kind]
    padding = tuple(before for before, _ in layer.padding)
    items = [
        f"kernel_size={layer.kernel_size!r}",
        f"stride={layer.stride!r}",
        f"padding={padding!r}",
    ]
    if layer.kind != "avg_pool":
        items.append(f"dilation={layer.dilation!r}")
    elif not layer.count_include_pad:
        items.append("count_include_pad=False")
    if layer.pools:
        items.append(f"ceil_mode={layer.ceil_mode}")
    else:
        items = [str(layer.in_channels), str(layer.out_channels), *items]
        items += [f"groups={layer.groups}", f"bias={layer.bias}"]
    if layer.kind == "deconv":
        items.append(f"output_padding={layer.output_padding!r}")
    return f"{name}{layer.ndim}d({', '.join(items)}) on {shape}"


def _arguments(text: str, kind: str) -> dict[str, Any]:
    # Modules print padding_mode=reflect and padding=same without quotes.
    quoted = re.sub(r"=\s*([A-Za-z_]\w*)", _quoted, text)
    try:
        if re.search(r"\d[A-Za-z_]", quoted):  # Python would warn about some of these
            raise ValueError
        call = ast.parse(f"f({quoted})", mode="eval").body
        assert isinstance(call, ast.Call)  # noqa: S101
        positional = [ast.literal_eval(argument) for argument in call.args]
        named = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise MalformedRequest(f"the module's arguments cannot be read: {text[:64]!r}") from None
    known = _POSITIONAL[kind]
    values: dict[str, Any] = dict(zip(known, positional, strict=False))
    for name, value in named.items():
        if name not in known:
            raise MalformedRequest(f"the module has no argument {name!r}")
        values[name] = value
    for name, value in values.items():
        if not _TAKES.get(name, _is_sizes)(value):
            raise MalformedRequest(f"the module's {name} cannot be {repr(value)[:64]}")
    return values


def _quoted(found: re.Match[str]) -> str:
    word = found[1]
    return f"={word}" if word in ("True", "False", "None") else f"={word!r}"


def _is_number(value: Any) -> bool:
    return type(value) is int


def _is_sizes(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return 1 <= len(value) <= 3 and all(type(each) is int for each in value)
    return type(value) is int


def _is_adaptive(value: Any) -> bool:
    each = value if isinstance(value, tuple | list) else (value,)
    return 1 <= len(each) <= 3 and all(one is None or type(one) is int for one in each)


# What the arguments take that are not one size or one for each dimension.
_TAKES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("in_channels", "out_channels", "groups"), _is_number),
    **dict.fromkeys(
        ("bias", "return_indices", "ceil_mode", "count_include_pad"),
        lambda value: type(value) in (bool, int),
    ),
    "padding_mode": lambda value: type(value) is str,
    "padding": lambda value: value in ("same", "valid") or _is_sizes(value),
    "stride": lambda value: value is None or _is_sizes(value),
    "divisor_override": lambda value: value is None or _is_number(value),
    "output_size": _is_adaptive,
}


def _padding(
    value: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    if value == "valid":
        value = 0
    if value != "same":
        return pairs(value, len(kernel))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple((each // 2, each - each // 2) for each in reach)
