"""The CPU backend: the embedded default where there is no GPU."""

from __future__ import annotations

from convgrad_service.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
