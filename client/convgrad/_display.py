"""Formats results for prompts and notebooks: dtypes and shapes instead of elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

__all__ = ["described", "fields_text", "html_table"]


def described(value: Any) -> str:
    """Format a tensor as ``float32[8, 32, 56, 56]`` and anything else as its repr."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {described(each)}' for name, each in value.items())}}}"
    return repr(value)


def fields_text(kind: str, fields: Iterable[tuple[str, Any]]) -> str:
    """Format fields as ``Kind(name=float32[2, 3], …)``."""
    return f"{kind}({', '.join(f'{name}={described(value)}' for name, value in fields)})"


def html_table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Format names and values as an HTML table, for ``_repr_html_``."""
    body = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(described(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption>{escape(title)}</caption>{body}</table>"
