"""``GET /layers``: parses a layer's notation, or lists the suites of named layers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from convgrad import layers
from convgrad.errors import MalformedRequest

__all__ = ["answer_layers"]


async def answer_layers(request: Request) -> Response:
    """Return a ``layer``'s sizes and notations, or a ``suite``'s layers, or the suites' names.

    ``batch`` overrides the layer's number of samples.
    """
    query = request.query_params
    for name in query:
        if name not in ("layer", "suite", "batch"):
            raise MalformedRequest(f'unknown field "{name[:64]}"; expected layer, batch or suite')
    if "layer" in query:
        layer = layers.parse(query["layer"])
        if "batch" in query:
            layer = layer.with_batch(_number("batch", query["batch"]))
        return JSONResponse(_described(layer))
    if "suite" in query:
        found = [
            {**_described(each.layer), "suite": each.suite, "networks": dict(each.networks)}
            for each in layers.suite(query["suite"])
        ]
        return JSONResponse({"layers": found})
    return JSONResponse({"suites": list(layers.suite_names())})


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise MalformedRequest(f"{name} is {text[:32]!r}; expected a number")
    return int(text)


def _described(layer: layers.Layer) -> dict[str, Any]:
    return {
        "title": layer.title,
        **asdict(layer),
        "output_size": layer.output_size,
        "operations": layers.operations_of(layer),
        "spellings": layers.spellings(layer),
    }
