"""Request tensors in shared memory: the field ``shared_memory`` of ``/verify``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from convgrad.contract.fields import Parsed
from convgrad.dtypes import DType

__all__ = ["SharedTensor", "SharedTensors"]

_MAX_TENSORS, _MAX_RANK = 16, 8
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A C-contiguous tensor that begins ``offset`` bytes into a registered region."""

    region: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for values that no request may have."""
        if not isinstance(self.region, str):
            raise TypeError
        if len(self.shape) > _MAX_RANK:
            raise ValueError
        if not all(type(each) is int and 0 <= each < _INT64 for each in (*self.shape, self.offset)):
            raise ValueError

    @property
    def size_bytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def _shared_tensors(value: Any) -> dict[str, SharedTensor]:
    if not isinstance(value, Mapping) or len(value) > _MAX_TENSORS:
        raise TypeError
    return {str(name): _shared_tensor(fields) for name, fields in value.items()}


def _shared_tensor(fields: Any) -> SharedTensor:
    if not isinstance(fields, Mapping) or not {"region", "dtype", "shape"} <= fields.keys():
        raise TypeError
    typed = {"dtype": DType(fields["dtype"]), "shape": tuple(fields["shape"])}
    return SharedTensor(**{**fields, **typed})


SharedTensors = Annotated[
    Mapping[str, SharedTensor],
    Parsed(
        _shared_tensors,
        'an object such as {"result_output": {"region": "r", "dtype": "float32", "shape": [2, 3], '
        '"offset": 0}}',
        {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "region": {"type": "string"},
                    "dtype": {"type": "string", "enum": [each.value for each in DType]},
                    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    "offset": {"type": "integer", "minimum": 0, "default": 0},
                },
                "required": ["region", "dtype", "shape"],
                "additionalProperties": False,
            },
        },
    ),
]
"""Shared tensors by the fields that they stand for."""
