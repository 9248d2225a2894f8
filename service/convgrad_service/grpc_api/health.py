"""gRPC's health checking: whether the server takes work, asked once or watched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from convgrad.errors import DeviceUnavailable, NotFound
from convgrad.wire.sentences import shown
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.telemetry.request_context import RequestContext
from convgrad_service.grpc_api.call import Call
from convgrad_service.grpc_api.exchange import Exchanges
from convgrad_service.grpc_api.messages import HEALTH, SERVICE, message
from convgrad_service.grpc_api.receiving import received

__all__ = ["HealthMethods"]

_INTERVAL_S = 0.5
_Request, _Response = message("HealthCheckRequest", HEALTH), message("HealthCheckResponse", HEALTH)


class HealthMethods:
    """``Check`` and ``Watch``, of the server as a whole ("") and of the protocol's service."""

    def __init__(self, pipeline: Pipeline, exchanges: Exchanges) -> None:
        self._pipeline, self._exchanges = pipeline, exchanges
        self.handlers: Mapping[str, Callable[[Call], Awaitable[None]]] = {
            f"/{HEALTH.full_name}/Check": self._check,
            f"/{HEALTH.full_name}/Watch": self._watch,
        }

    async def _check(self, call: Call) -> None:
        async def work(_: RequestContext) -> None:
            request = await received(call, _Request)
            status = self._status(request.service)
            if status == _Response.SERVICE_UNKNOWN:
                raise NotFound(f"there is no service {shown(request.service)}")
            await call.send([_answer(status)])

        await self._exchanges.run("Check", call, work)

    async def _watch(self, call: Call) -> None:
        async def work(_: RequestContext) -> None:
            request = await received(call, _Request)
            told = None
            # For as long as the client listens: then this task is cancelled.
            while True:
                status = self._status(request.service)
                if status != told:
                    await call.send([_answer(status)])
                    await call.flush()
                    told = status
                await asyncio.sleep(_INTERVAL_S)

        await self._exchanges.run("Watch", call, work)

    def _status(self, service: str) -> int:
        if service not in ("", SERVICE.full_name):
            return int(_Response.SERVICE_UNKNOWN)
        try:
            self._pipeline.require_ready()
        except DeviceUnavailable:
            return int(_Response.NOT_SERVING)
        return int(_Response.SERVING)


def _answer(status: int) -> bytes:
    answer: Any = _Response(status=status)
    encoded: bytes = answer.SerializeToString()
    return encoded
