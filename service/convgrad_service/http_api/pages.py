"""Pages for browsers: Swagger UI at ``/docs``, and the web page at ``/ui/``.

Swagger UI comes from local files, so that it works offline. The web page's built files are in
``page/`` (sources: ``service/ui``, `make ui`). The files need no API key; the requests that they
send do. The Content-Security-Policy of the web page allows only this server's scripts and styles,
none inline.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

__all__ = ["POLICY", "add_docs", "add_page"]

_SWAGGER_ASSETS = "/docs/assets"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = Path(__file__).parent / "page"


def add_docs(app: FastAPI) -> None:
    """Add the page to ``app``; it renders ``/openapi.json``."""
    # The package contains Swagger UI's published files.
    directory = files("fastapi_offline") / "static"
    app.mount(_SWAGGER_ASSETS, StaticFiles(directory=str(directory)), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "").rstrip("/")
        return get_swagger_ui_html(
            openapi_url=f"{root}/openapi.json",
            title="convgrad",
            swagger_js_url=f"{root}{_SWAGGER_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{_SWAGGER_ASSETS}/swagger-ui.css",
            swagger_favicon_url="data:,",  # none, and no request for one
            swagger_ui_parameters={"defaultModelsExpandDepth": 0, "tryItOutEnabled": True},
        )


class _Page(StaticFiles):
    """Serves files; those in ``assets``, named by content hash, may be cached indefinitely."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["Content-Security-Policy"] = POLICY
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        fixed = Path(path).parts[:1] == ("assets",)
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
