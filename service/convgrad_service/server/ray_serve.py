"""The server as a Ray Serve application: one front end, and replicas that compute.

    serve run convgrad_service.server.ray_serve:application max_replicas=8 anonymous=true

The front end is the same application as `convgrad serve`, with a backend that sends each problem to
a replica and splits problems that are too large for one. Replicas are added and removed with the
load. Operations are pure, so the problems of a lost replica run again on another; results are
bitwise independent of the number of replicas.
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
from convgrad_service.problems import Problem
from convgrad_service.server.composition import backend_of, create_app
from convgrad_service.server.ray_grpc import METHODS, Answer, GrpcIngress
from convgrad_service.server.ray_options import Options
from convgrad_service.server.settings import Settings

_log = logging.getLogger("convgrad.ray")


class Compute:
    """A replica: the backend of one GPU, or of its share of the CPUs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._backend = backend_of(Settings(**settings))

    async def run(
        self, problem: Problem, tensors: Mapping[str, NDArray[Any]]
    ) -> Outcome | ServiceError:
        """Compute one problem; a ServiceError is returned, so that Ray does not wrap it."""
        try:
            return await asyncio.to_thread(self._backend.run, problem, tensors)
        except ServiceError as error:
            return error

    def check_health(self) -> None:
        """Raise if the device has failed; Ray then replaces the replica."""
        if self._backend.fault is not None:
            raise RuntimeError(self._backend.fault)


class Front:
    """The front end: HTTP, gRPC, validation and admission; computes nothing."""

    def __init__(self, compute: DeploymentHandle, options: Options) -> None:
        self._compute, self._options = compute, options
        slots = options.max_replicas * options.ongoing_per_replica
        # One event loop awaits all results: threads that each wait for a result block one another
        # in the object store for up to a second.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="replica-calls", daemon=True).start()
        settings = Settings(**{"compute_slots": slots, **options.settings})
        chosen = "cuda" if options.gpus_per_replica else "cpu"
        name = chosen if settings.backend == "auto" else settings.backend
        backend = Spread(self._submit, name=name, piece_bytes=int(options.piece_bytes), slots=slots)
        self._app = create_app(settings, backend)
        self._grpc = GrpcIngress(self._app.state.pipeline, settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def _submit(self, problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Future[Outcome]:
        return asyncio.run_coroutine_threadsafe(self._run(problem, tensors), self._loop)

    async def _run(self, problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> Outcome:
        """Compute on a replica, and again on another if it is lost."""
        for attempt in range(1, self._options.attempts + 1):
            try:
                outcome: Outcome | ServiceError = await self._compute.run.remote(problem, tensors)
            except RayTaskError:
                raise  # the replica is alive, so the problem would fail again
            except (RayError, RayServeException) as error:
                _log.warning("attempt %d: a replica or its result was lost: %s", attempt, error)
                # Its successor needs time to start; another replica may be free at once.
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


# Ray calls the front end's methods by their gRPC names.
for _name in METHODS:
    setattr(Front, _name, _grpc_method(_name))


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application from the arguments of the Serve configuration, see `Options`."""
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
                # Queued problems count, too.
                "target_ongoing_requests": options.target_ongoing,
                "upscale_delay_s": options.upscale_delay_s,
                "downscale_delay_s": options.downscale_delay_s,
            },
        )
        .bind(options.settings)
    )
    # Without an argument to `ingress`, Ray calls `__serve_build_asgi_app__`.
    front = serve.deployment(serve.ingress()(Front)).options(
        ray_actor_options={"num_cpus": 0, "resources": options.front_resources},
        max_ongoing_requests=10_000,
    )
    bound: serve.Application = front.bind(compute, options)
    return bound
