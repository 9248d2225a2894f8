"""The command line: ``convgrad serve | health | call | operations | demo | kernels | key``."""

from __future__ import annotations

from convgrad.cli._main import main

__all__ = ["main"]
