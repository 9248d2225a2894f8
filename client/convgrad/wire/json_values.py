"""The `values` form of a tensor: nested lists of numbers, for requests written by hand."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

__all__ = ["array_from_values", "values_from_array"]

_MAX_DIMENSIONS = 32
_SPECIAL = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def array_from_values(values: Any, dtype: DType, *, name: str) -> NDArray[Any]:
    """Convert nested lists to an array; ``dtype`` must be able to hold every number.

    Floats are rounded to nearest. A float beyond the range of ``dtype`` is an error, not Inf.
    """
    shape, elements = _flattened(values, name)
    convert = _floats if dtype.is_floating else _ints
    array = convert(elements, dtype, name).reshape(shape)
    array.flags.writeable = False
    return array


def values_from_array(array: NDArray[Any]) -> Any:
    """Convert an array exactly to nested lists of numbers, with strings for NaN and infinities."""
    if array.dtype.kind == "i":
        return array.tolist()
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        wide = array.astype(np.float64)
    if bool(np.isfinite(wide).all()):
        return wide.tolist()
    mixed = wide.astype(object)
    mixed[np.isnan(wide)] = "NaN"
    mixed[wide == np.inf] = "Infinity"
    mixed[wide == -np.inf] = "-Infinity"
    return mixed.tolist()


def _flattened(values: Any, name: str) -> tuple[tuple[int, ...], list[Any]]:
    """Return shape and elements, without recursion: deep nesting cannot exhaust the stack."""
    shape: list[int] = []
    items: list[Any] = [values]
    while items and any(isinstance(item, list) for item in items):
        if len(shape) == _MAX_DIMENSIONS:
            raise MalformedRequest(
                f"{name}: values are nested more than {_MAX_DIMENSIONS} lists deep"
            )
        lengths = {len(item) if isinstance(item, list) else None for item in items}
        if len(lengths) > 1:
            raise MalformedRequest(
                f"{name}: values are ragged, lists of different lengths at depth {len(shape) + 1}"
            )
        shape.append(len(items[0]))
        items = list(chain.from_iterable(items))
    return tuple(shape), items


def _ints(elements: list[Any], dtype: DType, name: str) -> NDArray[Any]:
    bounds = np.iinfo(dtype.numpy)
    for element in elements:
        if type(element) is not int:
            raise MalformedRequest(
                f"{name}: expected ints in values of {dtype}, got {shown(element)}"
            )
        if not bounds.min <= element <= bounds.max:
            raise MalformedRequest(f"{name}: {shown(element)} does not fit {dtype}")
    return np.array(elements, dtype=dtype.numpy)


def _floats(elements: list[Any], dtype: DType, name: str) -> NDArray[Any]:
    special = [i for i, element in enumerate(elements) if isinstance(element, str)]
    numbers = list(elements)
    for i in special:
        numbers[i] = 0.0
        if elements[i] not in _SPECIAL:
            raise MalformedRequest(
                f'{name}: expected numbers, "NaN", "Infinity" or "-Infinity" in values, '
                f"got {shown(elements[i])}"
            )
    if not {type(number) for number in numbers} <= {int, float}:
        wrong = next(number for number in numbers if type(number) not in (int, float))
        raise MalformedRequest(f"{name}: expected numbers in values, got {shown(wrong)}")
    try:
        wide = np.array(numbers, dtype=np.float64)
    except OverflowError:
        raise MalformedRequest(f"{name}: values hold an int too large for {dtype}") from None
    with np.errstate(over="ignore"):
        narrow = wide.astype(dtype.numpy)
        too_large = np.flatnonzero(~np.isfinite(narrow.astype(np.float64)))
    if too_large.size:
        raise MalformedRequest(
            f"{name}: {shown(numbers[too_large[0]])} does not fit {dtype}; an infinity is written "
            f'as the string "Infinity"'
        )
    for i in special:
        narrow[i] = _SPECIAL[elements[i]]
    return narrow
