"""Removes tracebacks from errors that outlive the code that raised them."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["without_traceback"]

E = TypeVar("E", bound=BaseException)


def without_traceback(error: E) -> E:
    """Return the error without its traceback, cause and context.

    Their frames hold the request's arrays. A frame that keeps the error in a variable makes a cycle
    of both, and the garbage collector, which counts objects and not bytes, may not run for long.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
