"""The part of ``/openapi.json`` about API keys: which paths need one, and how it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from convgrad_service.http_api.middleware import needs_no_key

__all__ = ["describe_keys"]

_SCHEME = "apiKey"
_METHODS = ("get", "put", "post", "delete")


def describe_keys(document: dict[str, Any], error: Callable[[int], Any], *, required: bool) -> None:
    """Add the refusals of a missing or restricted key to every path that may need a key.

    If this server requires keys, the document also says so, and the page at ``/docs`` then has a
    field for one.
    """
    for path, item in document["paths"].items():
        for method in item.keys() & set(_METHODS):
            described = item[method]
            if needs_no_key(path):
                if required:
                    described["security"] = []
                continue
            responses = described["responses"] | {"401": error(401), "403": error(403)}
            described["responses"] = dict(sorted(responses.items()))
    if required:
        document["components"]["securitySchemes"] = {
            _SCHEME: {
                "type": "http",
                "scheme": "bearer",
                "description": "An API key of this server.",
            }
        }
        document["security"] = [{_SCHEME: []}]
