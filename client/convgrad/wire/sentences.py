"""Formats invalid values for error messages, with a bounded length."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

__all__ = ["shown", "shown_count"]

_TEXT_LIMIT = 40
_INT_BITS_LIMIT = 128


def shown(value: Any) -> str:
    """Describe ``value`` by its JSON text if that is short, otherwise by its kind."""
    if value is None:
        return "null"
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        value = int(value)
        bits = value.bit_length()
        return str(value) if bits <= _INT_BITS_LIMIT else f"an int of {bits} bits"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, memoryview):  # how the JSON decoder represents a long string
        return f"a string of {value.nbytes} characters"
    if isinstance(value, list | tuple):
        return _shown_list(value)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {tuple(value.shape)}"
    return f"an object of type {type(value).__name__[:_TEXT_LIMIT]}"


def shown_count(count: int) -> str:
    """Format a number of bytes or elements, which may have any size."""
    bits = count.bit_length()
    return str(count) if bits <= _INT_BITS_LIMIT else f"about 1e{bits * 30103 // 100000}"


def _quoted(text: str) -> str:
    # json.dumps escapes control characters and lone surrogates.
    return json.dumps(text[:_TEXT_LIMIT]) + ("…" if len(text) > _TEXT_LIMIT else "")


def _shown_list(values: list[Any] | tuple[Any, ...]) -> str:
    if len(values) <= 8:
        text = "[" + ", ".join("[…]" if _nested(v) else shown(v) for v in values) + "]"
        if len(text) <= 2 * _TEXT_LIMIT:
            return text
    return f"a list of {len(values)} items"


def _nested(value: Any) -> bool:
    # Never descend into nested lists: they may be nested a hundred thousand deep.
    return isinstance(value, list | tuple | dict)
