"""``/docs``: Swagger UI, with local files so that it works offline."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

__all__ = ["add_docs"]

_ASSETS = "/docs/assets"


def add_docs(app: FastAPI) -> None:
    """Add the page to ``app``; it renders ``/openapi.json``."""
    # The package contains Swagger UI's published files.
    directory = files("fastapi_offline") / "static"
    app.mount(_ASSETS, StaticFiles(directory=str(directory)), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "").rstrip("/")
        return get_swagger_ui_html(
            openapi_url=f"{root}/openapi.json",
            title="convgrad",
            swagger_js_url=f"{root}{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{_ASSETS}/swagger-ui.css",
            swagger_favicon_url="data:,",  # none, and no request for one
            swagger_ui_parameters={"defaultModelsExpandDepth": 0, "tryItOutEnabled": True},
        )
