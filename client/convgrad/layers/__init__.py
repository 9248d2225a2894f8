"""Layer descriptions in other tools' notations: benchdnn, MIOpenDriver, PyTorch, ONNX, suites.

::

    layer = convgrad.layers.parse("mb32ic64ih56oc64oh56kh3ph1")
    layer.output_size, convgrad.layers.arguments("conv_bwd_data", layer).shapes

`parse` detects the notation; `text` and `spellings` write a layer in one or all of them.
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

# More than any layer needs, and little enough to parse quickly.
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
    """Parse the description of a layer in any supported notation.

    Parameters
    ----------
    words
        The name of a layer in a suite (``ck_headline``), a benchdnn problem
        (``mb32ic64ih56oc64oh56kh3ph1``, optionally preceded by ``--pool``, ``--deconv`` or
        ``--dt=bf16``), a MIOpenDriver line (``conv -n 32 -c 64 …``), a PyTorch module and the
        shape of its input (``Conv2d(…) on 32x64x56x56``), or an ONNX node and its shapes.

    Raises
    ------
    MalformedRequest
        The notation is not recognized, or the sizes contradict each other.
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
        f"the layer {words[:80]!r} is not known; expected a name that `convgrad layers` lists, "
        "a benchdnn problem, a MIOpenDriver command, a PyTorch module and its input's shape "
        f"(Conv2d(64, 64, 3) on 32x64x56x56), or an ONNX node and its shapes{hint}"
    )


def text(layer: Layer) -> str:
    """Format a layer for `parse`: as a benchdnn problem, or in the first notation that can.

    A benchdnn problem does not say whether the layer has a bias.
    """
    return next(iter(spellings(layer).values()))


def spellings(layer: Layer) -> dict[str, str]:
    """Format a layer in every notation that can express it, by the notation's name."""
    said = {}
    for name, write in _WRITERS.items():
        try:
            said[name] = write(layer)
        except MalformedRequest:
            continue
    return said
