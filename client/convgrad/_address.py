"""Where a client finds its server."""

from __future__ import annotations

import os

__all__ = ["server_url"]


def server_url(given: str | None) -> str:
    """Return ``given``, else the environment variable CONVGRAD_URL, else `convgrad serve`'s URL."""
    return given or os.environ.get("CONVGRAD_URL") or "http://127.0.0.1:8000"
