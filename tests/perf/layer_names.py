"""Layers by the names that stored results have: those of the suites, and those of random layers."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["layer_named"]

SUITES = ("networks", "other_networks", "layers", "transposed")
# Channels and groups (or "dw", channels and outputs per channel), sizes, kernel, stride, dilation,
# padding and batch. A dilation of 1 and padding of half the kernel may be left out.
NAME = re.compile(
    r"(dw(?P<depthwise>\d+)(x(?P<factor>\d+))?|(?P<inputs>\d+)>(?P<outputs>\d+)(g(?P<groups>\d+))?)"
    r"_(?P<size>[\dx]+)_k(?P<kernel>[\dx]+)(_s(?P<stride>\d+))?(_d(?P<dilation>\d+))?"
    r"(_p(?P<padding>[\dx]+))?(_n(?P<batch>\d+))?"
)


def layer_named(name: str, batch: int | None, *, square: bool = False) -> dict[str, Any] | None:
    """The convolution of this name as an entry of a suite, with a batch; None if there is none.

    With ``square``, a single size is that of both axes of an image, not a signal's.
    """
    if (layer := _suites().get(name)) is not None:
        return layer if batch is None else {**layer, "N": batch}
    found = NAME.fullmatch(name)
    if found is None:
        return None
    size = [int(one) for one in found["size"].split("x")]
    if square and len(size) == 1:
        size *= 2
    kernel, ndim = _extents(found["kernel"], len(size)), len(size)
    # Along axes of one tap, random depthwise layers have no stride.
    stride = [int(found["stride"] or 1)] * ndim
    if found["factor"]:
        stride = [1 if taps == 1 else step for taps, step in zip(kernel, stride, strict=True)]
    dilation = [int(found["dilation"] or 1)] * ndim
    reach = [apart * (taps - 1) for apart, taps in zip(dilation, kernel, strict=True)]
    padding = [one // 2 for one in reach]
    if found["padding"]:
        padding = _extents(found["padding"], ndim)
    axes = zip(size, padding, reach, stride, strict=True)
    inputs = int(found["depthwise"] or found["inputs"])
    outputs = inputs * int(found["factor"] or 1) if found["depthwise"] else int(found["outputs"])
    return {
        "name": name,
        "N": batch or int(found["batch"] or 1),
        "C": inputs,
        "K": outputs,
        "groups": inputs if found["depthwise"] else int(found["groups"] or 1),
        "ndim": ndim,
        "input_size": size,
        "output_size": [(one + 2 * pad - far - 1) // step + 1 for one, pad, far, step in axes],
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
    }


def _extents(text: str, ndim: int) -> list[int]:
    values = [int(one) for one in text.split("x")]
    return values * ndim if len(values) == 1 else values


@cache
def _suites() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for suite in SUITES:
        path = Path(__file__).resolve().parent / "suite" / f"{suite}.json"
        for layer in json.loads(path.read_text(encoding="utf-8")):
            if "groups" in layer and "kernel_size" in layer:
                found.setdefault(layer["name"], layer)
    return found
