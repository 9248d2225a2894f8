"""Named problems of average pooling, adaptive pooling and max unpooling, see `cases.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.support.numerics import reference_windows as windows
from tests.support.numerics.cases import Case
from tests.support.numerics.geometries import Shape

# (N, C), the input's size, the parameters. Divisors of gradients are alike or powers of two, so
# that small integers are divided exactly; UNEVEN has the others.
AVERAGE: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "plain": ((2, 5), (8, 10), {"kernel_size": 2}),
    "overlapping": ((2, 8), (9, 8), {"kernel_size": 3, "stride": 1, "padding": 1}),
    "strided": ((1, 16), (13, 12), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "each_dimension_its_own": (
        (2, 3),
        (9, 14),
        {"kernel_size": [2, 5], "stride": [1, 3], "padding": [1, 2]},
    ),
    "gaps": ((1, 3), (11, 10), {"kernel_size": 2, "stride": 3}),
    "without_the_padding": (
        (1, 8),
        (6, 7),
        {"kernel_size": 2, "stride": 1, "padding": 1, "count_include_pad": False},
    ),
    "ceil": ((2, 3), (7, 9), {"kernel_size": 2, "ceil_mode": True}),
    "ceil_padded": ((1, 4), (7, 6), {"kernel_size": 2, "padding": 1, "ceil_mode": True}),
    "divisor": (
        (1, 4),
        (6, 5),
        {"kernel_size": 3, "stride": 1, "padding": 1, "divisor_override": 7},
    ),
    "divisor_below_zero": ((1, 2), (5, 5), {"kernel_size": 2, "divisor_override": -3}),
    "asymmetric_padding": ((1, 3), (6, 7), {"kernel_size": 2, "padding": [[0, 1], [1, 0]]}),
    "whole_plane": ((2, 67), (8, 9), {"kernel_size": [8, 9]}),
    "large_windows": ((1, 16), (13, 15), {"kernel_size": [6, 5]}),
    "columns": ((2, 3), (9, 8), {"kernel_size": [3, 1], "stride": 1, "padding": [1, 0]}),
    "1d": ((2, 5), (31,), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "1d_large_windows": ((1, 3), (100,), {"kernel_size": 40}),
    "1d_one_window": ((2, 8), (20,), {"kernel_size": 11}),
    "3d": ((1, 5), (4, 6, 4), {"kernel_size": 2}),
    "3d_overlapping": ((1, 8), (5, 7, 6), {"kernel_size": 3, "stride": 1, "padding": 1}),
    "3d_planes": ((2, 3), (3, 8, 7), {"kernel_size": [1, 3, 3], "stride": [1, 2, 2]}),
}
ADAPTIVE: dict[str, tuple[Shape, Shape, Any]] = {
    "parts": ((2, 5), (8, 12), [4, 3]),
    "whole": ((2, 67), (7, 7), 1),
    "overlapping": ((1, 8), (5, 9), [4, 8]),
    "as_it_is": ((1, 4), (7, 6), [None, 6]),
    "rows": ((2, 3), (5, 7), [None, 1]),
    "upwards": ((1, 3), (3, 4), [6, 9]),
    "large_windows": ((1, 8), (24, 18), [3, 2]),
    "1d": ((2, 3), (30,), 6),
    "1d_whole": ((1, 2), (300,), 1),
    "3d": ((1, 5), (4, 6, 5), [2, 3, 4]),
    "3d_whole": ((2, 8), (3, 5, 4), 1),
}
UNEVEN_AVERAGE: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "uneven": (
        (2, 8),
        (9, 8),
        {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    ),
    "uneven_ceil": ((1, 3), (8, 9), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "uneven_large": (
        (1, 4),
        (12, 13),
        {"kernel_size": 5, "stride": 1, "padding": 2, "count_include_pad": False},
    ),
    "uneven_beyond_the_input": (
        (3, 7),
        (3, 4),
        {"kernel_size": 5, "stride": 1, "padding": 2, "count_include_pad": False},
    ),
    "uneven_pairs": (
        (1, 8),
        (9, 7),
        {"kernel_size": 2, "stride": 1, "padding": 1, "count_include_pad": False},
    ),
    "uneven_runs": (
        (1, 8),
        (19, 41),
        {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    ),
    "3d_uneven": (
        (1, 3),
        (5, 4, 6),
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    ),
}
UNEVEN_ADAPTIVE: dict[str, tuple[Shape, Shape, Any]] = {
    "uneven": ((2, 16), (7, 10), [4, 7]),
    "uneven_7": ((1, 3), (13, 24), 7),
    "1d_uneven": ((2, 3), (31,), 9),
    "3d_uneven": ((1, 3), (5, 7, 6), [3, 2, 4]),
}
# (N, C), the input's size, parameters. "anywhere": indices outside their pooling's windows.
UNPOOL: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "plain": ((2, 5), (4, 5), {"kernel_size": 2}),
    "overlapping": ((2, 8), (4, 5), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "larger": ((1, 16), (3, 4), {"kernel_size": 2, "output_size": [7, 9]}),
    "anywhere": ((2, 3), (5, 4), {"kernel_size": 2}),
    "anywhere_channels_16": ((1, 16), (6, 7), {"kernel_size": 2}),
    "1d": ((2, 3), (9,), {"kernel_size": 3}),
    "3d": ((1, 4), (2, 3, 2), {"kernel_size": 2}),
}


def avg_pool(name: str, sizes: Shape, size: Shape, params: Mapping[str, Any], way: str) -> Case:
    """A request of average pooling or of its gradient."""
    if way == "fwd":
        return Case(name, "avg_pool_fwd", {"input": (*sizes, *size)}, params)
    held = {name: value for name, value in params.items() if name != "divisor_override"}
    out = tuple(map(len, windows.sliding(size, held.pop("kernel_size"), **held)))
    shapes = {"grad_output": (*sizes, *out)}
    return Case(name, "avg_pool_bwd", shapes, {**params, "input_size": size})


def adaptive_pool(kind: str, name: str, sizes: Shape, size: Shape, out: Any, way: str) -> Case:
    """A request of adaptive pooling or of its gradient, from the input."""
    operation = f"adaptive_{kind}_pool_{way}"
    shape = (*sizes, *size)
    if way == "fwd":
        more = {"return_indices": True} if kind == "max" else {}
        return Case(name, operation, {"input": shape}, {"output_size": out, **more})
    grad = (*sizes, *map(len, windows.adaptive(size, out)))
    if kind == "max":
        return Case(name, operation, {"grad_output": grad, "input": shape})
    return Case(name, operation, {"grad_output": grad}, {"input_size": size})


def unpool(name: str, sizes: Shape, size: Shape, params: Mapping[str, Any], way: str) -> Case:
    """A request of max unpooling or of its gradient."""
    out = unpool_size(size, params)
    if way == "fwd":
        shapes = {"input": (*sizes, *size), "indices": (*sizes, *size)}
        return Case(name, "max_unpool_fwd", shapes, params)
    shapes = {"grad_output": (*sizes, *out), "indices": (*sizes, *size)}
    return Case(name, "max_unpool_bwd", shapes)


def unpool_size(size: Shape, params: Mapping[str, Any]) -> Shape:
    """Return the output size of a max unpooling."""
    if "output_size" in params:
        return tuple(params["output_size"])[-len(size) :]
    kernel, padding = params["kernel_size"], params.get("padding", 0)
    return tuple((n - 1) * params.get("stride", kernel) + kernel - 2 * padding for n in size)


def indices_of(case: Case, rng: Any) -> Any:
    """Indices that a max unpooling's case takes: in the windows of its pooling, or anywhere."""
    shape = case.shapes["indices"]
    if "grad_output" in case.shapes:
        return rng.integers(0, math.prod(case.shapes["grad_output"][2:]), shape)
    out = unpool_size(shape[2:], case.params)
    if case.name.startswith("anywhere"):
        return rng.integers(0, math.prod(out), shape)
    kernel, padding = case.params["kernel_size"], case.params.get("padding", 0)
    stride = case.params.get("stride", kernel)
    flat: Any = 0
    for a, extent in enumerate(out):
        places = [1] * len(shape)
        places[a + 2] = shape[a + 2]
        start = stride * np.arange(shape[a + 2]).reshape(places) - padding
        place = start + rng.integers(0, kernel, shape)
        flat = flat * extent + place.clip(start.clip(0), extent - 1)
    return flat


_MAKERS: dict[str, Callable[[str], list[Case]]] = {
    "avg_pool": lambda way: [avg_pool(name, *given, way) for name, given in AVERAGE.items()],
    "adaptive_avg_pool": lambda way: [
        adaptive_pool("avg", name, *given, way) for name, given in ADAPTIVE.items()
    ],
    "adaptive_max_pool": lambda way: [
        adaptive_pool("max", name, *given, way)
        for name, given in (ADAPTIVE | UNEVEN_ADAPTIVE).items()
    ],
    "max_unpool": lambda way: [unpool(name, *given, way) for name, given in UNPOOL.items()],
}
OPERATIONS = tuple(f"{name}_{way}" for name in _MAKERS for way in ("fwd", "bwd"))
"""Those that have cases here."""


def window_cases(operation: str) -> list[Case]:
    """The named problems of one operation."""
    name, _, way = operation.rpartition("_")
    return _MAKERS[name](way)


UNEVEN = [
    *(
        avg_pool(name, *given, way)
        for name, given in UNEVEN_AVERAGE.items()
        for way in ("fwd", "bwd")
    ),
    *(
        adaptive_pool("avg", name, *given, way)
        for name, given in UNEVEN_ADAPTIVE.items()
        for way in ("fwd", "bwd")
    ),
]
"""Averages over windows that differ in size: their gradients are rounded on the way."""
