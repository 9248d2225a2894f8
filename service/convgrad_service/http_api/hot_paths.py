"""The paths that compute, found at once: the router asks some forty routes, one after another."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["HotPaths", "Paths"]

Paths = Mapping[str, tuple[ASGIApp, Mapping[str, str]]]
"""For a whole path what answers a POST to it, and the parameters that a route would find in it."""


class HotPaths:
    """Takes a POST to one of ``paths``, and leaves everything else to the application.

    The routes are there as well: they say 405 to other methods, and are what the docs describe.
    """

    def __init__(self, app: ASGIApp, paths: Paths) -> None:
        self.app = app
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self.paths.get(scope["path"]) if scope.get("method") == "POST" else None
        if found is None or scope.get("root_path"):
            await self.app(scope, receive, send)
            return
        endpoint, parameters = found
        scope["path_params"] = parameters
        await endpoint(scope, receive, send)
