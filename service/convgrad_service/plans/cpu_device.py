"""The description of a CPU that plans are made for."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType

__all__ = ["VECTOR_BYTES", "CpuDevice", "sum_bytes"]

VECTOR_BYTES = {"x86_64": 16, "x86_64_v3": 32, "x86_64_v4": 64, "aarch64": 16}


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """Instruction-set level of the kernels, number of threads, and workspace limit."""

    level: str
    threads: int
    workspace_limit_bytes: int

    @property
    def vector_bytes(self) -> int:
        """Size of the widest vector register."""
        return VECTOR_BYTES[self.level]


def sum_bytes(dtype: DType) -> int:
    """Return the size of the accumulator type: float64 for float64, otherwise float32."""
    return 8 if dtype is DType.FLOAT64 else 4
