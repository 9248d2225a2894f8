"""Errors of the demo."""

from __future__ import annotations

__all__ = ["DemoError"]


class DemoError(Exception):
    """The demo cannot continue, or a check failed; the message says why."""
