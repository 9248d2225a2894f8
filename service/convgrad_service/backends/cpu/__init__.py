"""The CPU backend: the default of the embedded service if there is no GPU."""

from __future__ import annotations

from convgrad_service.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
