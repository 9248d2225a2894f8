"""`UsageError`: the command line, or a file it names, is wrong."""

from __future__ import annotations

__all__ = ["UsageError"]


class UsageError(Exception):
    """One sentence that says what was found and what was expected."""
