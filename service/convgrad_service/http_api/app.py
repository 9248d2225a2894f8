"""Builds the ASGI application: its routes, and the middleware around every exchange."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from convgrad import _version
from convgrad.contract import OPERATIONS, Operation
from convgrad.contract.examinations import PLANS, TIMINGS, VERIFICATIONS
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.telemetry.tracing import traces_to
from convgrad_service.http_api.codecs import OperationTransport
from convgrad_service.http_api.describing import answer_layers, catalogue, health_router
from convgrad_service.http_api.examinations import PlanTransport, TimeTransport, VerifyTransport
from convgrad_service.http_api.middleware import ExchangeMiddleware, _App, context_of
from convgrad_service.http_api.oip_routes import add_oip
from convgrad_service.http_api.openapi import install_openapi
from convgrad_service.http_api.pages import add_docs, add_page
from convgrad_service.http_api.problem_details import from_http_exception, problem_details
from convgrad_service.http_api.stored_tensors import stored_routes
from convgrad_service.http_api.transport import Endpoint, HttpTransport
from convgrad_service.security.keys import KeyRing
from convgrad_service.server.settings import Settings

__all__ = ["app_on", "management_app", "with_cors"]

_COMPUTING: tuple[tuple[Mapping[str, Operation], str, type[HttpTransport]], ...] = (
    (OPERATIONS, "POST", OperationTransport),
    (VERIFICATIONS, "POST", VerifyTransport),
    (TIMINGS, "POST", TimeTransport),
    (PLANS, "GET", PlanTransport),
)
_REQUEST_HEADERS = (
    "Authorization",
    "Content-Type",
    "Inference-Header-Content-Length",
    "X-Request-Id",
    "X-Request-Timeout",
    "X-Time-To-Live",
)
_ANSWER_HEADERS = (
    "Inference-Header-Content-Length",
    "Retry-After",
    "Server-Timing",
    "X-Report",
    "X-Request-Id",
)


def app_on(
    pipeline: Pipeline, settings: Settings, close: Callable[[], None] | None = None
) -> FastAPI:
    """Build the application for ``pipeline``; ``close`` is called at shutdown."""

    traces = traces_to(settings.otlp_endpoint) if settings.otlp_endpoint else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if traces is not None:
            traces.open()
        yield
        pipeline.close()
        if traces is not None:
            await traces.close()
        if close is not None:
            close()

    app = _App(
        title="convgrad",
        summary="Gradients of convolution and pooling layers as a service.",
        version=_version.__version__,
        lifespan=lifespan,
        docs_url=None,  # ours, from local files; see pages.py
        redoc_url=None,
        redirect_slashes=False,  # a redirected POST sends its tensors twice
    )
    app.state.pipeline = pipeline
    app.state.settings = settings
    endpoints: dict[str, ASGIApp] = {}
    for operations_of, method, transport in _COMPUTING:
        for operation in operations_of.values():
            endpoint = Endpoint(transport, operation, pipeline, settings)
            path = f"/{operation.name}"
            if method == "POST":
                endpoints[path] = endpoint
            app.router.routes.append(Route(path, endpoint, methods=[method], name=operation.name))
    app.router.routes.append(Route("/layers", answer_layers, methods=["GET"], name="layers"))

    # The catalogue never changes while the server runs.
    described = catalogue(pipeline, settings)

    @app.get(
        "/operations",
        tags=["operations"],
        summary="Describe all operations.",
    )
    async def operations() -> JSONResponse:
        return JSONResponse(described)

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> RedirectResponse:
        return RedirectResponse(request.scope.get("root_path", "") + "/docs")

    app.include_router(health_router(pipeline))
    endpoints.update(add_oip(app, pipeline, settings))
    app.router.routes.extend(stored_routes(pipeline, settings))
    add_docs(app)
    add_page(app)
    install_openapi(app, settings)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    keys = KeyRing(settings.api_keys, settings.key_limits) if settings.api_keys else None
    inner = partial(FastAPI.__call__, app)
    app.exchange = ExchangeMiddleware(inner, pipeline, keys, traces, endpoints)
    if settings.cors_origins is not None:
        app.exchange = with_cors(app.exchange, settings.cors_origins)
    return app


def management_app(pipeline: Pipeline) -> FastAPI:
    """Build an application of health and metrics only, without keys, for the management port."""
    app = _App(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.pipeline = pipeline
    app.include_router(health_router(pipeline))
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.exchange = ExchangeMiddleware(partial(FastAPI.__call__, app), pipeline)
    return app


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Convert Starlette's and FastAPI's own errors (404, 405), keeping their headers."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    context = context_of(request.scope)
    ours = from_http_exception(error, request.method, request.url.path)
    context.code = ours.code
    status, headers, body = problem_details(ours, context.request_id)
    answer = Response(body, status)
    answer.raw_headers[:] = headers
    answer.headers.update(error.headers or {})  # Allow, with a 405
    return answer


def with_cors(app: ASGIApp, origins: str) -> ASGIApp:
    """Wrap ``app`` for a comma-separated list of origins; preflight requests need no API key."""
    return CORSMiddleware(
        app,
        allow_origins=[origin.strip() for origin in origins.split(",") if origin.strip()],
        allow_methods=["GET", "POST", "PUT", "DELETE"],
        allow_headers=_REQUEST_HEADERS,
        expose_headers=_ANSWER_HEADERS,
        max_age=3600,
    )
