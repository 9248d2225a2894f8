"""The application: the dataplane, the routes in front of it, and what surrounds every exchange."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from convgrad import _version
from convgrad.contract import OPERATIONS
from convgrad_service.backends.base import Backend
from convgrad_service.backends.selection import BackendOptions, backend_named
from convgrad_service.engine.dataplane import Dataplane
from convgrad_service.engine.limits import Limits
from convgrad_service.engine.memory import MemoryBudget, default_budget_bytes
from convgrad_service.engine.queue import ComputeQueue
from convgrad_service.http_api.catalogue import catalogue
from convgrad_service.http_api.context import context_of
from convgrad_service.http_api.docs import add_docs
from convgrad_service.http_api.health import health_router
from convgrad_service.http_api.middleware import ExchangeMiddleware
from convgrad_service.http_api.openapi import install_openapi
from convgrad_service.http_api.operations import OperationEndpoint
from convgrad_service.http_api.problem_details import from_http_exception, problem_details
from convgrad_service.metrics import Metrics
from convgrad_service.settings import Settings

__all__ = ["create_app"]


def create_app(settings: Settings | None = None, backend: Backend | None = None) -> FastAPI:
    """The server as an ASGI application.

    ``settings`` default to the environment's, ``backend`` to the one that they name. The dataplane
    is at ``app.state.dataplane``, for other transports and for tests.
    """
    settings = settings or Settings()
    dataplane = _dataplane(settings, backend or _backend(settings))
    metrics = _metrics(dataplane)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        dataplane.close()

    app = FastAPI(
        title="convgrad",
        summary="Gradients of convolution and pooling layers as a service.",
        version=_version.__version__,
        lifespan=lifespan,
        docs_url=None,  # ours, from local files; see docs.py
        redoc_url=None,
        redirect_slashes=False,  # a redirected POST sends its tensors twice
    )
    app.state.dataplane = dataplane
    app.state.settings = settings
    for operation in OPERATIONS.values():
        endpoint = OperationEndpoint(operation, dataplane, settings)
        app.router.routes.append(
            Route(f"/{operation.name}", endpoint, methods=["POST"], name=operation.name)
        )

    # The catalogue never changes while the server runs.
    described = catalogue(dataplane, settings)

    @app.get("/operations", tags=["operations"], summary="What each operation takes and gives.")
    async def operations() -> JSONResponse:
        return JSONResponse(described)

    @app.get("/", include_in_schema=False)
    async def root(request: Request) -> RedirectResponse:
        return RedirectResponse(request.scope.get("root_path", "") + "/docs")

    app.include_router(health_router(dataplane, metrics))
    add_docs(app)
    install_openapi(app, settings)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(ExchangeMiddleware, metrics=metrics)
    return app


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's and FastAPI's own refusals (404, 405), in our form and with their headers."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for nothing else
    context = context_of(request.scope)
    ours = from_http_exception(error, request.method, request.url.path)
    context.code = ours.code
    status, headers, body = problem_details(ours, context.request_id)
    answer = Response(body, status)
    answer.raw_headers[:] = headers
    answer.headers.update(error.headers or {})  # Allow, with a 405
    return answer


def _backend(settings: Settings) -> Backend:
    options = BackendOptions(
        threads=settings.threads,
        workspace_limit_bytes=settings.workspace_bytes,
        kernel_cache=settings.kernel_cache,
    )
    return backend_named(settings.backend, options)


def _dataplane(settings: Settings, backend: Backend) -> Dataplane:
    return Dataplane(
        backend,
        limits=Limits(settings.max_problem_bytes, settings.max_problem_flops),
        queue=ComputeQueue(
            settings.compute_slots, settings.max_queue, large_s=settings.large_problem_s
        ),
        memory=MemoryBudget(settings.max_inflight_bytes or default_budget_bytes()),
        codec_threads=settings.codec_threads,
    )


def _metrics(dataplane: Dataplane) -> Metrics:
    metrics = Metrics(dataplane.backend.name)
    queue, memory = dataplane.queue, dataplane.memory
    metrics.gauge("convgrad_queue_depth", "Problems that wait.", lambda: queue.waiting)
    metrics.gauge("convgrad_running", "Problems that compute.", lambda: queue.running)
    metrics.gauge(
        "convgrad_inflight_bytes", "Memory requests in flight hold.", lambda: memory.used_bytes
    )
    metrics.gauge("convgrad_threads", "Threads of the process.", threading.active_count)
    return metrics
