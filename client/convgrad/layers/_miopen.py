"""Parses and formats MIOpenDriver lines, such as ``conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.layers._layer import Kind, Layer

__all__ = ["looks_like_miopen", "parse_miopen", "to_miopen"]

_DTYPES = {"": "float32", "fp16": "float16", "bfp16": "bfloat16", "fp64": "float64"}
_SUFFIX = {DType(name): suffix for suffix, name in _DTYPES.items()}
_COMMANDS = tuple(f"{kind}{suffix}" for kind in ("conv", "pool") for suffix in _DTYPES)
# Long option names and their letters; ``-y`` and ``-x`` of a pool are its window.
_LONG = {
    "batchsize": "n",
    "in_channels": "c",
    "in_d": "!",
    "in_h": "H",
    "in_w": "W",
    "out_channels": "k",
    "fil_d": "@",
    "fil_h": "y",
    "fil_w": "x",
    "win_h": "y",
    "win_w": "x",
    "win_d": "@",
    "pad_d": "$",
    "pad_h": "p",
    "pad_w": "q",
    "conv_stride_d": "#",
    "conv_stride_h": "u",
    "conv_stride_w": "v",
    "pad_stride_d": "#",
    "dilation_d": "^",
    "dilation_h": "l",
    "dilation_w": "j",
    "trans_output_pad_d": "%",
    "trans_output_pad_h": "Y",
    "trans_output_pad_w": "X",
    "group_count": "g",
    "forw": "F",
    "mode": "m",
    "spatial_dim": "_",
    "in_layout": "I",
    "out_layout": "O",
    "fil_layout": "f",
    "bias": "b",
}
# Options that control measurement and output, not the layer.
_IGNORED = frozenset("itVwSsPaerzGBZ") | {
    "iter", "time", "verify", "wall", "search", "solution", "printconv", "dump_output",
}  # fmt: skip
_DIRECTIONS = {1: "conv_fwd", 2: "conv_bwd_data", 4: "grouped_conv_bwd_weight", 6: "conv_backward"}
_LETTERS = {
    "size": "!HW",
    "kernel": "@yx",
    "padding": "$pq",
    "stride": "#uv",
    "dilation": "^lj",
    "more": "%YX",
}


def looks_like_miopen(text: str) -> bool:
    """Return whether the first word is the driver, or one of its commands followed by options."""
    first, _, rest = text.strip().partition(" ")
    return first.endswith("MIOpenDriver") or (first in _COMMANDS and rest.lstrip().startswith("-"))


def parse_miopen(text: str) -> Layer:
    """Parse a MIOpenDriver command line.

    Raises
    ------
    MalformedRequest
        A command or an option is unknown, or has no value.
    """
    try:
        words = shlex.split(text)
    except ValueError as refused:
        raise MalformedRequest(f"the MIOpenDriver line cannot be read: {refused}") from refused
    if words and words[0].endswith("MIOpenDriver"):
        words = words[1:]
    if not words or words[0] not in _COMMANDS:
        found = words[0][:32] if words else ""
        raise MalformedRequest(
            f"MIOpenDriver command {found!r}; expected one of {', '.join(_COMMANDS)}"
        )
    command, options = words[0], _options(words[1:])
    pools = command.startswith("pool")
    mode = options.get("m", "max" if pools else "conv")
    if mode not in (("max", "avg", "avg_in") if pools else ("conv", "trans")):
        raise MalformedRequest(f"MIOpenDriver mode {mode[:32]!r} is not supported")
    ndim = _number(options, "_", 3 if "!" in options else 2)
    kind: Kind = "deconv" if mode == "trans" else "conv"
    if pools:
        kind = "pool" if mode == "max" else "avg_pool"
    default = 2 if pools else 3
    channels = _number(options, "c", 3)
    layout = options.get("I")
    padding = _each(options, "padding", ndim, 0)
    return Layer(
        kind=kind,
        batch=_number(options, "n", 100),  # MIOpenDriver's defaults, here and below
        in_channels=channels,
        out_channels=channels if pools else _number(options, "k", 32),
        groups=_number(options, "g", 1),
        input_size=_each(options, "size", ndim, 32),
        kernel_size=_each(options, "kernel", ndim, default),
        stride=_each(options, "stride", ndim, default if pools else 1),
        padding=tuple((pad, pad) for pad in padding),
        dilation=_each(options, "dilation", ndim, 1),
        output_padding=_each(options, "more", ndim, 0) if kind == "deconv" else (),
        count_include_pad=mode != "avg",
        bias=_number(options, "b", 0) == 1,
        dtype=DType(_DTYPES[command[4:]]),
        layout=None if layout in (None, "NCHW", "NCDHW", "NCW") else layout,
        operation=_operation(kind, options, ndim),
    )


def to_miopen(layer: Layer) -> str:
    """Format a layer as a MIOpenDriver line; raise MalformedRequest if it cannot be expressed."""
    if layer.kind in ("separable", "adaptive_pool") or layer.ndim == 1 or layer.ceil_mode:
        raise MalformedRequest("MIOpenDriver has no line for such a layer")
    if any(before != after for before, after in layer.padding):
        raise MalformedRequest("MIOpenDriver needs the same padding on both sides")
    dtype = layer.dtype or DType.FLOAT32
    words = [f"{'pool' if layer.pools else 'conv'}{_SUFFIX[dtype]}"]
    words += ["-n", str(layer.batch), "-c", str(layer.in_channels)]
    if not layer.pools:
        words += ["-k", str(layer.out_channels)]
    if layer.ndim == 3:
        words += ["-_", "3"]
    values = {
        "size": layer.input_size,
        "kernel": layer.kernel_size,
        "padding": [before for before, _ in layer.padding],
        "stride": layer.stride,
        "dilation": layer.dilation,
    }
    if layer.kind == "deconv":
        values["more"] = layer.output_padding
    for name, numbers in values.items():
        letters = _LETTERS[name][3 - layer.ndim :]
        for letter, number in zip(letters, numbers, strict=True):
            words += [f"-{letter}", str(number)]
    average = "avg_in" if layer.count_include_pad else "avg"
    modes = {"pool": "max", "avg_pool": average, "deconv": "trans"}
    words += ["-m", modes.get(layer.kind, "conv")]
    if not layer.pools:
        words += ["-g", str(layer.groups), "-b", str(int(layer.bias))]
    if layer.layout is not None:
        words += ["-I", layer.layout]
    return shlex.join(words)


def _options(words: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    at = 0
    while at < len(words):
        word = words[at]
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name:
            raise MalformedRequest(f"MIOpenDriver line: expected an option, got {word[:32]!r}")
        if not equals:
            at += 1
            if at == len(words):
                raise MalformedRequest(f"MIOpenDriver option {word[:32]!r} has no value")
            value = words[at]
        at += 1
        letter = _LONG.get(name, name)
        if letter in _IGNORED:
            continue
        if letter not in _LONG.values():
            raise MalformedRequest(f"MIOpenDriver option {word[:32]!r} is not supported")
        options[letter] = value
    return options


def _number(options: Mapping[str, str], letter: str, default: int) -> int:
    value = options.get(letter)
    if value is None:
        return default
    if not value.isdecimal() or len(value) > 12:
        raise MalformedRequest(
            f"MIOpenDriver option -{letter} is {value[:32]!r}; expected a number"
        )
    return int(value)


def _each(options: Mapping[str, str], name: str, ndim: int, default: int) -> tuple[int, ...]:
    if ndim not in (2, 3):
        raise MalformedRequest(f"MIOpenDriver spatial_dim is {ndim}; expected 2 or 3")
    return tuple(_number(options, letter, default) for letter in _LETTERS[name][3 - ndim :])


def _operation(kind: Kind, options: Mapping[str, str], ndim: int) -> str | None:
    direction = _number(options, "F", 0)
    if direction == 0:
        return None
    if kind in ("pool", "avg_pool"):
        name = f"maxpool{ndim}d" if kind == "pool" else "avg_pool"
        return f"{name}_{'fwd' if direction == 1 else 'bwd'}"
    return _DIRECTIONS.get(direction) if kind == "conv" else None
