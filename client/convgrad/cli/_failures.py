"""`UsageError`: the command line, or a file that it names, is invalid."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """One sentence that says what was found and what was expected."""
