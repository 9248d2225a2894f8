"""Builds the ASGI application: its routes, the middleware around them, and what it says of itself.

Swagger UI at ``/docs`` comes from local files, so that it works offline. The built files of the web
page at ``/ui/`` are in ``page/`` (sources: ``service/ui``, `make ui`). The files need no API key;
the requests that they send do. The Content-Security-Policy of the web page allows only scripts and
styles of this server, none inline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from convgrad import _version, layers
from convgrad.contract import OPERATIONS, Operation
from convgrad.contract.examinations import PLANS, TIMINGS, VERIFICATIONS
from convgrad.errors import MalformedRequest
from convgrad_service.engine.engine import call_hub
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.telemetry.tracing import traces_to
from convgrad_service.http_api.codecs import REQUEST_FORMATS, RESPONSE_FORMATS, OperationTransport
from convgrad_service.http_api.examinations import PlanTransport, TimeTransport, VerifyTransport
from convgrad_service.http_api.middleware import ExchangeApp, ExchangeMiddleware, context_of
from convgrad_service.http_api.oip import add_oip
from convgrad_service.http_api.openapi import add_openapi
from convgrad_service.http_api.problem_details import from_http_exception, problem_details
from convgrad_service.http_api.stored_tensors import stored_routes
from convgrad_service.http_api.transport import Endpoint, HttpTransport
from convgrad_service.security.keys import KeyRing
from convgrad_service.server.settings import Settings

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
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_NOT_LIVE: dict[int | str, dict[str, Any]] = {
    503: {"description": "No device has worked for a long time: the server must be restarted."}
}
_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {"description": "Requests are refused: the server shuts down, or its device has failed."}
}
_SWAGGER_ASSETS = "/docs/assets"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = Path(__file__).parent / "page"


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

    app = ExchangeApp(
        title="convgrad",
        summary="Gradients of convolution and pooling layers as a service.",
        version=_version.__version__,
        lifespan=lifespan,
        openapi_url=None,  # ours: see add_openapi, add_docs
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirected POST sends its tensors twice
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.pipeline = pipeline
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
    add_openapi(app, settings)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    keys = KeyRing(settings.api_keys, settings.key_limits) if settings.api_keys else None
    inner = partial(FastAPI.__call__, app)
    app.exchange = ExchangeMiddleware(inner, pipeline, keys, traces, endpoints)
    if settings.cors_origins is not None:
        app.exchange = with_cors(app.exchange, settings.cors_origins)
    return app


def management_app(pipeline: Pipeline) -> FastAPI:
    """Build an application of health and metrics only, without keys, for the management port."""
    app = ExchangeApp(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.pipeline = pipeline
    app.include_router(health_router(pipeline))
    app.add_exception_handler(HTTPException, partial(_answer_http_exception, management=True))
    app.exchange = ExchangeMiddleware(partial(FastAPI.__call__, app), pipeline)
    return app


async def _answer_http_exception(
    request: Request, error: Exception, *, management: bool = False
) -> Response:
    """Convert Starlette's and FastAPI's own errors (404, 405), keeping their headers."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    context = context_of(request.scope)
    path = request.url.path
    ours = from_http_exception(error, request.method, path, management=management)
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


def catalogue(pipeline: Pipeline, settings: Settings) -> dict[str, Any]:
    """Return the operations, formats and limits as JSON-compatible values."""
    return {
        "server": "convgrad",
        "version": _version.__version__,
        "backend": pipeline.engine.status.backend,
        "media_types": list(REQUEST_FORMATS),
        "answer_media_types": list(RESPONSE_FORMATS),
        "limits": {
            "body_bytes": {
                media_type: int(getattr(settings, form.limit))
                for media_type, form in REQUEST_FORMATS.items()
            },
            "problem_bytes": pipeline.limits.problem_bytes,
            "problem_flops": pipeline.limits.problem_flops,
            "output_ratio": pipeline.limits.output_ratio,
            "inflight_bytes": pipeline.engine.limit_bytes,
            "queue": settings.max_queue,
            "timeout_s": settings.max_timeout_s,
        },
        "operations": [_described(operation) for operation in OPERATIONS.values()],
    }


def _described(operation: Operation) -> dict[str, Any]:
    schema = operation.request.model_json_schema()
    parameters = {
        name: field for name, field in schema["properties"].items() if name not in operation.tensors
    }
    described: dict[str, Any] = {
        "name": operation.name,
        "path": f"/{operation.name}",
        "summary": operation.summary,
        "tensors": {
            name: {
                "required": name in operation.required_tensors,
                "description": schema["properties"][name].get("description", ""),
            }
            for name in operation.tensors
        },
        "outputs": list(operation.outputs),
        "dtypes": [dtype.value for dtype in operation.dtypes],
        "layouts": list(operation.layouts),
        "parameters": {
            "type": "object",
            "properties": parameters,
            "required": [name for name in schema.get("required", []) if name in parameters],
            "additionalProperties": False,
        },
        "example": operation.example,
    }
    if "$defs" in schema:
        described["parameters"]["$defs"] = schema["$defs"]
    return described


async def answer_layers(request: Request) -> Response:
    """Return a ``layer``'s sizes and notations, or a ``suite``'s layers, or the suites' names.

    ``batch`` overrides the layer's number of samples.
    """
    query = request.query_params
    for name in query:
        if name not in ("layer", "suite", "batch"):
            raise MalformedRequest(f'unknown field "{name[:64]}"; expected layer, batch or suite')
        if len(query.getlist(name)) > 1:
            raise MalformedRequest(f'the query has "{name}" twice')
    if "layer" in query:
        layer = layers.parse(query["layer"])
        if "batch" in query:
            layer = layer.with_batch(_number("batch", query["batch"]))
        return JSONResponse(_described_layer(layer))
    if "suite" in query:
        found = [
            {**_described_layer(each.layer), "suite": each.suite, "networks": dict(each.networks)}
            for each in layers.suite(query["suite"])
        ]
        return JSONResponse({"layers": found})
    return JSONResponse({"suites": list(layers.suite_names())})


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise MalformedRequest(f"{name} is {text[:32]!r}; expected a number")
    return int(text)


def _described_layer(layer: layers.Layer) -> dict[str, Any]:
    return {
        "title": layer.title,
        **asdict(layer),
        "output_size": layer.output_size,
        "operations": layers.operations_of(layer),
        "spellings": layers.spellings(layer),
    }


def health_router(pipeline: Pipeline) -> APIRouter:
    """Return the routes for health and metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/v2/health/live", summary="Whether the process responds.", responses=_NOT_LIVE)
    async def server_live() -> JSONResponse:
        pipeline.require_live()
        return JSONResponse({"live": True})

    @router.get("/v2/health/ready", summary="Whether requests are accepted.", responses=_NOT_READY)
    async def server_ready() -> JSONResponse:
        pipeline.require_ready()
        return JSONResponse({"ready": True})

    @router.get("/metrics", summary="Metrics for Prometheus.", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await call_hub(pipeline.engine, Hub.exposition), media_type=_PROMETHEUS)

    return router


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
