"""The demo's own errors."""

from __future__ import annotations

__all__ = ["DemoError"]


class DemoError(Exception):
    """The demo cannot go on, or did not show what it is there to show; the text says why."""
