"""Integers in requests: their limits, their normal form, and how error messages spell them.

Everything works on Python ints of any size and allocates nothing, so a small request for a huge
geometry is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod

from convgrad.errors import InvalidProblem

__all__ = [
    "MAX_ELEMENTS",
    "MAX_EXTENT",
    "InconsistentSizes",
    "IntOrSequence",
    "Padding",
    "Pads",
    "Size",
    "Size3",
    "by",
    "check_shape",
    "one_or_by",
    "pads_text",
    "pairs_per_dimension",
    "per_dimension",
    "positive",
    "require_shape",
    "show",
    "size3",
    "size_of_length",
    "tuple_text",
]

# Kernels index one dimension with 32-bit signed integers, and a tensor with 64-bit ones.
MAX_EXTENT = 2**31 - 1
MAX_ELEMENTS = 2**40

Size = tuple[int, ...]
Size3 = tuple[int, int, int]
Pads = tuple[tuple[int, int], ...]
IntOrSequence = int | Sequence[int]
Padding = int | Sequence[int | Sequence[int]]


class InconsistentSizes(InvalidProblem):
    """Sizes contradict each other as they were read in a layout; `problem_from` says in which."""


def show(value: object) -> str:
    """Return ``value`` for a message; an integer too long to read is described instead."""
    if isinstance(value, int) and value.bit_length() > 96:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def tuple_text(values: Iterable[object]) -> str:
    """Return ``(8, 64, 30, 30)``, as NumPy writes a shape."""
    parts = [show(value) for value in values]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def by(values: Sequence[int]) -> str:
    """Return ``3x3`` for a kernel."""
    return "x".join(show(value) for value in values)


def _uniform(values: Sequence[object]) -> bool:
    return all(value == values[0] for value in values)


def one_or_by(values: Sequence[int]) -> str:
    """Return ``2`` if every dimension has 2, else ``2x1``."""
    return show(values[0]) if _uniform(values) else by(values)


def pads_text(pads: Pads) -> str:
    """Return ``1``, ``1x2``, or ``[0, 1]x[1, 1]`` if the two sides differ."""
    if all(before == after for before, after in pads):
        return one_or_by([before for before, _ in pads])
    return "x".join(f"[{show(before)}, {show(after)}]" for before, after in pads)


def _checked(name: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidProblem(f"{name} is {value!r}; expected an integer")
    if value < minimum:
        raise InvalidProblem(f"{name} is {show(value)}; expected at least {minimum}")
    if value > MAX_EXTENT:
        raise InvalidProblem(f"{name} is {show(value)}; expected at most {MAX_EXTENT}")
    return value


def positive(name: str, value: object) -> int:
    """Return ``value`` if it is an integer from 1 to MAX_EXTENT.

    Raises
    ------
    InvalidProblem
        It is not.
    """
    return _checked(name, value, 1)


def per_dimension(name: str, value: IntOrSequence, ndim: int, *, minimum: int = 1) -> Size:
    """Return one integer per spatial dimension, in the order D, H, W.

    Raises
    ------
    InvalidProblem
        The number of values is wrong, or one is outside minimum ... MAX_EXTENT.
    """
    if isinstance(value, int):
        return (_checked(name, value, minimum),) * ndim
    if len(value) != ndim:
        raise InconsistentSizes(
            f"{name} has {_count(value)}; expected one integer, or {ndim} (one per spatial "
            "dimension)"
        )
    return tuple(_checked(f"{name}[{i}]", item, minimum) for i, item in enumerate(value))


def pairs_per_dimension(name: str, value: Padding, ndim: int) -> Pads:
    """Return padding as (before, after) for each spatial dimension, in the order D, H, W.

    Raises
    ------
    InvalidProblem
        The number of values is wrong, or one is outside 0 ... MAX_EXTENT.
    """
    if isinstance(value, int):
        both = _checked(name, value, 0)
        return ((both, both),) * ndim
    if len(value) != ndim:
        raise InconsistentSizes(
            f"{name} has {_count(value)}; expected one integer, or {ndim} (for each spatial "
            "dimension an integer or a [before, after] pair)"
        )
    return tuple(_pair(f"{name}[{i}]", item) for i, item in enumerate(value))


def _pair(name: str, item: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(item, int):
        both = _checked(name, item, 0)
        return both, both
    if len(item) != 2:
        raise InvalidProblem(
            f"{name} has {_count(item)}; expected an integer or a [before, after] pair"
        )
    return _checked(f"{name}[0]", item[0], 0), _checked(f"{name}[1]", item[1], 0)


def _count(values: Sequence[object]) -> str:
    return "1 value" if len(values) == 1 else f"{len(values)} values"


def size_of_length(name: str, value: Sequence[int], spatial: int, full: int, order: str) -> bool:
    """Return whether ``value`` is a full shape (True) or a spatial size (False), by its length.

    ``order`` names the full shape's dimensions in the error message.

    Raises
    ------
    InvalidProblem
        It has another length, or a value outside 1 ... MAX_EXTENT.
    """
    for i, item in enumerate(value):
        positive(f"{name}[{i}]", item)
    if len(value) not in (spatial, full):
        raise InvalidProblem(
            f"{name} has {_count(value)}; expected {spatial} (the spatial size) or {full} "
            f"(the full shape, {order})"
        )
    return len(value) == full


def check_shape(name: str, shape: Sequence[int]) -> Size:
    """Return ``shape`` if extents are in 1 ... MAX_EXTENT and elements at most MAX_ELEMENTS.

    Raises
    ------
    InvalidProblem
        They are not.
    """
    if any(extent < 1 for extent in shape):
        raise InvalidProblem(
            f"{name} has shape {tuple_text(shape)}; expected at least 1 in every dimension"
        )
    if any(extent > MAX_EXTENT for extent in shape):
        raise InvalidProblem(
            f"{name} has shape {tuple_text(shape)}; expected at most {MAX_EXTENT} in any dimension"
        )
    if prod(shape) > MAX_ELEMENTS:
        raise InvalidProblem(
            f"{name} has shape {tuple_text(shape)}, {show(prod(shape))} elements; expected at "
            f"most {MAX_ELEMENTS}"
        )
    return tuple(shape)


def require_shape(name: str, found: Sequence[int], expected: Sequence[int], source: str) -> None:
    """Check a shape; ``source`` is a clause such as "from ..." that says why it is expected.

    Raises
    ------
    InvalidProblem
        The shapes differ.
    """
    if tuple(found) != tuple(expected):
        raise InconsistentSizes(
            f"{name} has shape {tuple_text(found)}; expected {tuple_text(expected)} {source}"
        )


@lru_cache(maxsize=4096)
def size3(values: tuple[int, ...], lead: int = 1) -> Size3:
    """Return one to three values as three, with ``lead`` for the missing leading ones."""
    padded = (*[lead] * (3 - len(values)), *values)
    return padded[0], padded[1], padded[2]
