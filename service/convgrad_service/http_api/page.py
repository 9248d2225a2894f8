"""``/ui/``: the web page, whose built files are in ``page/`` (sources: ``service/ui``, `make ui`).

The files need no API key; the requests that they send do. The Content-Security-Policy allows only
this server's scripts and styles, none inline.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

__all__ = ["POLICY", "add_page"]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = Path(__file__).parent / "page"
_ASSETS = "assets"


class _Page(StaticFiles):
    """Serves files; those in ``assets``, named by content hash, may be cached indefinitely."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["Content-Security-Policy"] = POLICY
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        fixed = Path(path).parts[:1] == (_ASSETS,)
        answer.headers["Cache-Control"] = (
            "public, max-age=31536000, immutable" if fixed else "no-cache"
        )
        return answer


def add_page(app: FastAPI) -> None:
    """Add the page to ``app``."""

    @app.get("/ui", include_in_schema=False)
    async def ui(request: Request) -> RedirectResponse:
        return RedirectResponse(request.scope.get("root_path", "").rstrip("/") + "/ui/")

    app.mount("/ui/", _Page(directory=_FILES, html=True), name="ui")
