"""The server embedded in another program, as an ASGI application with its own engine."""

from __future__ import annotations

from fastapi import FastAPI

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.hub import Hub
from convgrad_service.http_api.app import app_on
from convgrad_service.server.composition import embedded_pipeline
from convgrad_service.server.settings import Settings

__all__ = ["create_app"]


def create_app(settings: Settings | None = None, backend: ServingBackend | None = None) -> FastAPI:
    """Make an ASGI application with its own engine in this process.

    ``settings`` default to the environment's, ``backend`` to the one that they name. The pipeline
    is at ``app.state.pipeline``, for other transports and for tests.
    """
    settings = settings or Settings()
    pipeline = embedded_pipeline(settings, backend)
    hub = pipeline.engine
    assert isinstance(hub, Hub)  # noqa: S101
    return app_on(pipeline, settings, hub.close)
