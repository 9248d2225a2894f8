"""The types of request fields: their accepted values, error messages and JSON Schema.

The types here only check types. `Problem` checks that sizes and geometry are consistent, for every
transport.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, Strict
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from convgrad.contract.tensor_schema import tensor_json_schema
from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad.wire.sentences import shown

__all__ = [
    "Flag",
    "IndexTensor",
    "Int",
    "IntOrInts",
    "IntPair",
    "Ints",
    "LayoutName",
    "Names",
    "Number",
    "OutputSize",
    "Padding",
    "Parsed",
    "SplitK",
    "Tensor",
    "TensorType",
    "distinct_choices",
]

# Longer than any shape or padding; longer lists are rejected without reading them.
_MAX_ITEMS = 8
# Far above any size that a Problem accepts, and small enough to print quickly.
_MAX_INT_BITS = 256


@dataclass(frozen=True, eq=False)
class Parsed:
    """Metadata for `Annotated`: ``parse`` reads the value, or raises ValueError or TypeError.

    Refusals all read ``expected <expected>, got <value>``, so one sentence serves a union of
    types where pydantic would give a message for each member.
    """

    parse: Callable[[Any], Any]
    expected: str
    schema: Mapping[str, Any]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return dict(self.schema)

    def _validate(self, value: Any) -> Any:
        try:
            return self.parse(value)
        except (ValueError, TypeError, OverflowError):
            sentence = f"expected {self.expected}, got {shown(value)}"
            raise PydanticCustomError("refused", "{sentence}", {"sentence": sentence}) from None


class TensorType(Parsed):
    """Marks a field as a tensor; the registry finds an operation's tensors by it."""


# Problem checks which dtypes each tensor may have, and that they agree.
def _tensor(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, np.ndarray) or DType.of(value.dtype) is None:
        raise TypeError
    return value


def _plain_flag(value: Any) -> Any:
    return bool(value) if isinstance(value, np.bool_) else value


def _int(value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError
    # operator.index also accepts NumPy ints, and rejects floats and strings.
    number = operator.index(value)
    if number.bit_length() > _MAX_INT_BITS:
        raise ValueError
    return number


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = tuple(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        raise TypeError
    if len(value) > _MAX_ITEMS:
        raise ValueError
    return value


def _ints(value: Any) -> tuple[int, ...]:
    return tuple(_int(item) for item in _items(value))


def _int_or_ints(value: Any) -> int | tuple[int, ...]:
    return _ints(value) if isinstance(value, Sequence | np.ndarray) else _int(value)


def _int_pair(value: Any) -> tuple[int, int]:
    first, second = _ints(value)
    return first, second


def _padding(value: Any) -> int | tuple[int | tuple[int, int], ...]:
    if not isinstance(value, Sequence | np.ndarray):
        return _int(value)
    return tuple(
        _int_pair(item) if isinstance(item, Sequence | np.ndarray) else _int(item)
        for item in _items(value)
    )


def _output_size(value: Any) -> int | tuple[int | None, ...]:
    if not isinstance(value, Sequence | np.ndarray):
        return _int(value)
    return tuple(None if item is None else _int(item) for item in _items(value))


def _number(value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _names(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError
    if len(value) > _MAX_ITEMS:
        raise ValueError
    if not all(isinstance(text, str) for item in value.items() for text in item):
        raise TypeError
    return dict(value)


def _split_k(value: Any) -> Literal["auto"] | int:
    if isinstance(value, str):
        if value != "auto":
            raise ValueError
        return "auto"
    return _int(value)


def _layout(value: Any) -> str:
    # Problem checks that the name exists and suits the rank; only its type is checked here.
    if not isinstance(value, str) or not value.isascii() or not 1 <= len(value) <= 16:
        raise ValueError
    return value


def distinct_choices(*choices: str) -> Parsed:
    """A non-empty list of different members of ``choices``."""

    def parse(value: Any) -> tuple[str, ...]:
        chosen = tuple(_items(value))
        if not chosen or any(not isinstance(item, str) or item not in choices for item in chosen):
            raise ValueError
        if len(set(chosen)) != len(chosen):
            raise ValueError
        return chosen

    listed = ", ".join(f'"{choice}"' for choice in choices)
    return Parsed(
        parse,
        f"a list of one or more of {listed}, each at most once",
        {
            "type": "array",
            "items": {"type": "string", "enum": list(choices)},
            "minItems": 1,
            "uniqueItems": True,
        },
    )


_INT = {"type": "integer"}
_INTS = {"type": "array", "items": _INT, "maxItems": _MAX_ITEMS}
_PAIR = {"type": "array", "items": _INT, "minItems": 2, "maxItems": 2}

_Array = np.ndarray[Any, np.dtype[Any]]

Tensor = Annotated[
    _Array,
    TensorType(
        _tensor,
        "a tensor (float16, bfloat16, float32 or float64)",
        tensor_json_schema(FLOATING),
    ),
]
"""A floating-point tensor: a NumPy array, which the codecs of `convgrad.wire` make."""

IndexTensor = Annotated[
    _Array, TensorType(_tensor, "a tensor (int32 or int64)", tensor_json_schema(INDEX))
]
"""A tensor of indices of maxima."""

Int = Annotated[int, Parsed(_int, "an int", _INT)]
Ints = Annotated[
    tuple[int, ...], Parsed(_ints, f"a list of ints, at most {_MAX_ITEMS} of them", _INTS)
]
IntOrInts = Annotated[
    int | tuple[int, ...],
    Parsed(_int_or_ints, "an int or a list of ints", {"oneOf": [_INT, _INTS]}),
]
IntPair = Annotated[tuple[int, int], Parsed(_int_pair, "a list of two ints", _PAIR)]
Padding = Annotated[
    int | tuple[int | tuple[int, int], ...],
    Parsed(
        _padding,
        "an int or a list of ints or of [before, after] pairs of ints",
        {
            "oneOf": [
                _INT,
                _INTS,
                {"type": "array", "items": _PAIR, "minItems": 1, "maxItems": _MAX_ITEMS},
            ]
        },
    ),
]
OutputSize = Annotated[
    int | tuple[int | None, ...],
    Parsed(
        _output_size,
        "an int or a list of ints and nulls",
        {
            "oneOf": [
                _INT,
                # Integers and nulls, of which openapi-generator's Go could make no type.
                {"type": "array", "items": {}, "maxItems": _MAX_ITEMS},
            ]
        },
    ),
]
"""Of an adaptive pooling; null leaves a dimension as large as it is."""
Number = Annotated[float, Parsed(_number, "a finite number", {"type": "number"})]
SplitK = Annotated[
    Literal["auto"] | int,
    Parsed(_split_k, '"auto" or an int', {"oneOf": [{"const": "auto"}, _INT]}),
]
LayoutName = Annotated[
    str, Parsed(_layout, 'the name of a layout such as "NCHW" or "NHWC"', {"type": "string"})
]
Names = Annotated[
    Mapping[str, str],
    Parsed(
        _names,
        'an object of names such as {"weight": "w1"}',
        {"type": "object", "additionalProperties": {"type": "string"}},
    ),
]
"""Names of tensors that are kept on a server, by the fields that they stand for."""
Flag = Annotated[bool, BeforeValidator(_plain_flag), Strict()]
