"""The server as a Ray Serve application: one front end, replicas that compute.

    serve run convgrad_service.server.ray_serve:application max_replicas=8 anonymous=true

The front end is the same application as `convgrad serve`, with a backend that sends each problem
to a replica, and cuts one that is too large for a replica along its own `split`. Replicas come
and go with the work that waits. Operations are pure, so what a lost replica held runs again on
another; the bits of an answer depend on neither how many replicas there are nor which computed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from convgrad.errors import DeviceUnavailable, ServiceError
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.spread import Spread
from convgrad_service.http_api.app import create_app
from convgrad_service.problems import Problem
from convgrad_service.server.composition import backend_of
from convgrad_service.server.ray_grpc import METHODS, Answer, GrpcIngress
from convgrad_service.server.ray_options import Options
from convgrad_service.server.settings import Settings

__all__ = ["application"]

_log = logging.getLogger("convgrad.ray")


class Compute:
    """A replica: the backend of one GPU, or of its share of the CPUs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._backend = backend_of(Settings(**settings))

    async def run(
        self, problem: Problem, tensors: Mapping[str, NDArray[Any]]
    ) -> Outcome | ServiceError:
        """Compute one problem; what the caller did wrong comes back as a value."""
        try:
            return await asyncio.to_thread(self._backend.run, problem, tensors)
        except ServiceError as refused:
            return refused

    def check_health(self) -> None:
        """Ray's question; a replica that fails it is replaced."""
        if self._backend.fault is not None:
            raise RuntimeError(self._backend.fault)


class Front:
    """The front end: HTTP, validation, admission; computes nothing."""

    def __init__(self, compute: DeploymentHandle, options: Options) -> None:
        self._compute, self._options = compute, options
        slots = options.max_replicas * options.ongoing_per_replica
        # Answers are awaited on one loop: threads that wait for some each keep the others' from
        # being taken out of the object store, for up to a second.
        self._sending = asyncio.new_event_loop()
        threading.Thread(target=self._sending.run_forever, name="send", daemon=True).start()
        settings = Settings(**{"compute_slots": slots, **options.settings})
        chosen = "cuda" if options.gpus_per_replica else "cpu"
        name = chosen if settings.backend == "auto" else settings.backend
        backend = Spread(self._submit, name=name, piece_bytes=int(options.piece_bytes), slots=slots)
        self._app = create_app(settings, backend)
        self._grpc = GrpcIngress(self._app.state.pipeline, settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def _submit(self, problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        return asyncio.run_coroutine_threadsafe(self._run(problem, tensors), self._sending)

    async def _run(self, problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Outcome:
        """On one replica; again on another where that was lost."""
        for attempt in range(1, self._options.attempts + 1):
            try:
                outcome: Outcome | ServiceError = await self._compute.run.remote(problem, tensors)
            except RayTaskError:
                raise  # the replica lives: what failed there would fail again
            except (RayError, RayServeException) as lost:
                _log.warning("attempt %d: a replica or its answer was lost: %s", attempt, lost)
                # Its successor takes a moment to start; others may be free at once.
                await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
                continue
            if isinstance(outcome, ServiceError):
                raise outcome
            return outcome
        raise DeviceUnavailable(
            f"{self._options.attempts} replicas were lost while they computed this problem"
        )


def _grpc_method(name: str) -> Callable[[Front, bytes, Any], Awaitable[Answer]]:
    async def method(self: Front, body: bytes, grpc_context: Any) -> Answer:
        return await self._grpc.call(name, body, grpc_context)

    return method


# Ray calls the front end's methods by the names of gRPC's.
for _name in METHODS:
    setattr(Front, _name, _grpc_method(_name))


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, from `Options` as Serve hands them over."""
    options = Options.model_validate(dict(arguments))
    compute = (
        serve.deployment(Compute)
        .options(
            ray_actor_options={
                "num_cpus": options.cpus_per_replica,
                "num_gpus": options.gpus_per_replica,
            },
            max_ongoing_requests=options.ongoing_per_replica,
            autoscaling_config={
                "min_replicas": options.min_replicas,
                "max_replicas": options.max_replicas,
                # What waits counts too: a queue is what replicas are added for.
                "target_ongoing_requests": options.target_ongoing,
                "upscale_delay_s": options.upscale_delay_s,
                "downscale_delay_s": options.downscale_delay_s,
            },
        )
        .bind(options.settings)
    )
    # Without an application here, Ray asks the replica for its own.
    front = serve.deployment(serve.ingress()(Front)).options(
        ray_actor_options={"num_cpus": 0, "resources": options.front_resources},
        max_ongoing_requests=10_000,
    )
    bound: serve.Application = front.bind(compute, options)
    return bound
