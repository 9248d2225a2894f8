"""Drawing tensors, rounding them to a dtype, and laying them out: shared with no service code.

Canonical arrays are channels first with the groups inside the channel axis; a request's arrays have
the order of dimensions that its layout names.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.support.numerics.cases import Case
from tests.support.numerics.window_cases import indices_of

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("NCW", "NWC", "NGCW", "NWGC", "GNWC"),
    2: ("NCHW", "NHWC", "NGCHW", "NHWGC", "GNHWC"),
    3: ("NCDHW", "NDHWC", "NGCDHW", "NDHWGC", "GNDHWC"),
}
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
_WEIGHTS = frozenset({"weight", "weight0", "weight1", "grad_weight", "grad_grad_weight"})
_VECTORS = frozenset({"bias", "bias0", "bias1", "grad_bias", "grad_grad_bias"})
# What `accumulate` is shaped like, where that is not an activation.
_ACCUMULATES_WEIGHT = frozenset({"grouped_conv_bwd_weight"})

Arrays = dict[str, NDArray[Any]]


def rng_for(seed: int, *names: object) -> np.random.Generator:
    """Each test's own generator, so that none depends on which tests ran before."""
    return np.random.default_rng([seed, zlib.crc32(repr(names).encode())])


def integers(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Integers in [-2, 2]: every dtype holds them, and their products and sums, exactly."""
    return rng.integers(-2, 3, shape).astype(dtype)


def normals(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Normal numbers, a few of them a hundred times larger: neither all alike nor all random."""
    scale = np.where(rng.random(shape) < 0.02, 30.0, 1.0)
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(dtype)


def draw(case: Case, rng: np.random.Generator, dtype: np.dtype[Any], numbers: Any) -> Arrays:
    """Canonical tensors for a case, by `integers` or `normals`."""
    return {
        name: indices_of(case, rng) if name == "indices" else numbers(rng, shape, dtype)
        for name, shape in case.shapes.items()
    }


def is_weight(operation: str, tensor: str) -> bool:
    """Whether a tensor is laid out as a weight."""
    return tensor in _WEIGHTS or (tensor == "accumulate" and operation in _ACCUMULATES_WEIGHT)


def _orders(operation: str, tensor: str, layout: str) -> tuple[str, str]:
    """(canonical order, order in the layout), G apart."""
    spatial = "".join(s for s in layout if s in "DHW")
    if not is_weight(operation, tensor):
        return "NGC" + spatial, layout if "G" in layout else layout.replace("C", "GC")
    last = layout.endswith("C")
    return "GKC" + spatial, "GK" + (spatial + "C" if last else "C" + spatial)


def laid_out(
    operation: str, tensor: str, array: NDArray[Any], layout: str | None, groups: int = 1
) -> NDArray[Any]:
    """A canonical array in a layout, contiguous."""
    if layout is None or tensor in _VECTORS:
        return array
    canonical, wanted = _orders(operation, tensor, layout)
    first, second = array.shape[:2]
    if is_weight(operation, tensor):
        split = array.reshape(groups, first // groups, second, *array.shape[2:])
    else:
        split = array.reshape(first, groups, second // groups, *array.shape[2:])
    moved = split.transpose([canonical.index(axis) for axis in wanted])
    if "G" not in layout:
        g = wanted.index("G")
        shape = [*moved.shape[:g], moved.shape[g] * moved.shape[g + 1], *moved.shape[g + 2 :]]
        moved = moved.reshape(shape)
    return np.ascontiguousarray(moved)


def canonical(
    operation: str, tensor: str, array: NDArray[Any], layout: str | None, groups: int = 1
) -> NDArray[Any]:
    """The inverse of `laid_out`."""
    if layout is None or tensor in _VECTORS:
        return array
    order, held = _orders(operation, tensor, layout)
    if "G" not in layout:
        g = held.index("G")
        inner = array.shape[g] // groups
        array = array.reshape(*array.shape[:g], groups, inner, *array.shape[g + 1 :])
    split = array.transpose([held.index(axis) for axis in order])
    merged = 0 if is_weight(operation, tensor) else 1
    shape = [
        *split.shape[:merged],
        split.shape[merged] * split.shape[merged + 1],
        *split.shape[merged + 2 :],
    ]
    return split.reshape(shape)


def request_arrays(case: Case, tensors: Mapping[str, NDArray[Any]], layout: str | None) -> Arrays:
    """A case's canonical tensors as its request in `layout` carries them."""
    return {
        name: laid_out(case.operation, name, array, layout, case.groups)
        for name, array in tensors.items()
    }


def spatial_axes(ndim: int) -> str:
    return _SPATIAL[ndim]
