"""The command line: ``convgrad serve | call | operations | demo``."""

from __future__ import annotations

from convgrad.cli._main import main

__all__ = ["main"]
