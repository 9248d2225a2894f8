"""Layers in anybody's words: suite names, benchdnn, MIOpenDriver, PyTorch and ONNX.

::

    layer = convgrad.layers.parse("mb32ic64ih56oc64oh56kh3ph1")
    layer.output_size, convgrad.layers.arguments("conv_bwd_data", layer).shapes

`parse` tells them apart; `text` and `spellings` say a layer in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convgrad.errors import MalformedRequest
from convgrad.layers._benchdnn import looks_like_benchdnn, parse_benchdnn, to_benchdnn
from convgrad.layers._layer import Kind, Layer
from convgrad.layers._miopen import looks_like_miopen, parse_miopen, to_miopen
from convgrad.layers._onnx import looks_like_onnx, parse_onnx, to_onnx
from convgrad.layers._suites import SuiteLayer, find_named, nearest, suite, suite_names
from convgrad.layers._tensors import Arguments, arguments, operations_of
from convgrad.layers._torch import looks_like_torch, parse_torch, to_torch

__all__ = [
    "Arguments",
    "Kind",
    "Layer",
    "SuiteLayer",
    "arguments",
    "operations_of",
    "parse",
    "spellings",
    "suite",
    "suite_names",
    "text",
]

# Longer than any layer is said, and short enough to be read at once.
_MAX_CHARACTERS = 4096

_DIALECTS: Mapping[str, tuple[Callable[[str], bool], Callable[[str], Layer]]] = {
    "miopen": (looks_like_miopen, parse_miopen),
    "torch": (looks_like_torch, parse_torch),
    "onnx": (looks_like_onnx, parse_onnx),
    "benchdnn": (looks_like_benchdnn, parse_benchdnn),
}
_WRITERS: Mapping[str, Callable[[Layer], str]] = {
    "benchdnn": to_benchdnn,
    "miopen": to_miopen,
    "torch": to_torch,
    "onnx": to_onnx,
}


def parse(words: str) -> Layer:
    """The layer that a line states, in whichever of the dialects.

    Parameters
    ----------
    words
        A name of a suite (``ck_headline``, ``resnet50``'s layers), a benchdnn problem
        (``mb32ic64ih56oc64oh56kh3ph1``, with ``--pool``, ``--deconv``, ``--dt=bf16`` before it), a
        MIOpenDriver line (``conv -n 32 -c 64 …``), a PyTorch module and its input's shape
        (``Conv2d(…) on 32x64x56x56``), or an ONNX node and its shapes.

    Raises
    ------
    MalformedRequest
        It is none of those, or says sizes that contradict each other.
    """
    if len(words) > _MAX_CHARACTERS:
        raise MalformedRequest(
            f"the layer has {len(words):,} characters; expected at most {_MAX_CHARACTERS:,}"
        )
    words = words.strip()
    if (named := find_named(words)) is not None:
        return named
    for recognised, read in _DIALECTS.values():
        if recognised(words):
            return read(words)
    near = nearest(words)
    hint = f"; did you mean {near!r}?" if near else ""
    raise MalformedRequest(
        f"the layer {words[:80]!r} is not known; expected the name of a layer of "
        f"{', '.join(suite_names()[:2])}, a benchdnn problem, a MIOpenDriver line, a PyTorch "
        f"module or an ONNX node{hint}"
    )


def text(layer: Layer) -> str:
    """A line that `parse` reads back: a benchdnn problem, or where it has none a PyTorch module."""
    return to_torch(layer) if layer.kind == "adaptive_pool" else to_benchdnn(layer)


def spellings(layer: Layer) -> dict[str, str]:
    """The layer in every dialect that can say it, by the dialect's name."""
    said = {}
    for name, write in _WRITERS.items():
        try:
            said[name] = write(layer)
        except MalformedRequest:
            continue
    return said
