"""The command line, ``convgrad COMMAND``: see `_main` for the commands."""

from __future__ import annotations

from convgrad.cli._main import main

__all__ = ["main"]
