"""How a refused value is shown in an error sentence: short, whatever was sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

__all__ = ["shown"]

_TEXT_LIMIT = 40
_INT_BITS_LIMIT = 128


def shown(value: Any) -> str:
    """Describe ``value`` as its JSON text where that is short, else by what kind of thing it is."""
    if value is None:
        return "null"
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int):
        bits = value.bit_length()
        return str(int(value)) if bits <= _INT_BITS_LIMIT else f"an int of {bits} bits"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, memoryview):  # a long string, as the JSON decoder leaves it
        return f"a string of {value.nbytes} characters"
    if isinstance(value, list | tuple):
        return _shown_list(value)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {tuple(value.shape)}"
    return f"a {type(value).__name__[:_TEXT_LIMIT]}"


def _quoted(text: str) -> str:
    # json.dumps keeps control characters and lone surrogates out of logs and answers.
    return json.dumps(text[:_TEXT_LIMIT]) + ("…" if len(text) > _TEXT_LIMIT else "")


def _shown_list(values: list[Any] | tuple[Any, ...]) -> str:
    if len(values) <= 8:
        text = "[" + ", ".join("[…]" if _nested(v) else shown(v) for v in values) + "]"
        if len(text) <= 2 * _TEXT_LIMIT:
            return text
    return f"a list of {len(values)} items"


def _nested(value: Any) -> bool:
    # A list inside a refused list may nest a hundred thousand deep: it is never walked.
    return isinstance(value, list | tuple | dict)
