"""Element types of convgrad tensors and their names in each wire format."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["FLOATING", "INDEX", "DType"]


class DType(StrEnum):
    """An element type; its value is the name that requests use."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype; bfloat16 comes from ml_dtypes."""
        return _NUMPY[self]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.numpy.itemsize

    @property
    def safetensors(self) -> str:
        """The name in a safetensors header, e.g. ``BF16``."""
        return _SAFETENSORS[self]

    @property
    def is_floating(self) -> bool:
        return self in FLOATING

    @classmethod
    def of(cls, dtype: np.dtype[Any]) -> DType | None:
        """Return the member for a NumPy dtype of native byte order, or None."""
        return _FROM_NUMPY.get(dtype)

    @classmethod
    def from_safetensors(cls, name: str) -> DType | None:
        """Return the member with this name in safetensors headers, or None."""
        return _FROM_SAFETENSORS.get(name)


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
}
_SAFETENSORS = {
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT32: "F32",
    DType.FLOAT64: "F64",
    DType.INT32: "I32",
    DType.INT64: "I64",
}
_FROM_NUMPY = {dtype: member for member, dtype in _NUMPY.items()}
_FROM_SAFETENSORS = {name: member for member, name in _SAFETENSORS.items()}

FLOATING = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
INDEX = (DType.INT32, DType.INT64)
