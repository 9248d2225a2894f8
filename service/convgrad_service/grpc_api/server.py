"""The grpcio server: the inference service, health checking and reflection on one port.

`DescribingMethods` are those of the inference service that do not compute.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, get_args

import grpc
from google.protobuf.json_format import ParseDict

from convgrad.contract import OPERATIONS
from convgrad.errors import DeviceUnavailable, NotFound, UnsupportedProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.engine import call_hub
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.shm.registry import RegionInfo
from convgrad_service.engine.telemetry.record import RequestMetrics
from convgrad_service.engine.telemetry.tracing import traces_to
from convgrad_service.grpc_api.exchange import Call, Exchanges, MethodHandlers
from convgrad_service.grpc_api.infer_transport import MAX_MESSAGE_BYTES, InferMethod
from convgrad_service.grpc_api.limits import MessageReader, PendingResponses
from convgrad_service.grpc_api.standard_services import HealthMethods, reflection_handlers
from convgrad_service.grpc_api.stream import StreamMethod
from convgrad_service.grpc_api.wire import SERVICE, message, parsed
from convgrad_service.oip.fields import Kind, SharedMemory, operation_named
from convgrad_service.oip.models import (
    model_config,
    model_metadata,
    model_statistics,
    repository_index,
    server_metadata,
)
from convgrad_service.security.keys import KeyRing
from convgrad_service.server.settings import Settings
from convgrad_service.server.tls import Pem, newest_pem

Fields = Mapping[str, Any]
"""The fields of a response, as in JSON; those that its message does not have are left out."""
Method = Callable[[Any, str], Awaitable[Fields]]
# Concurrent calls per connection; clients queue further ones.
_MAX_STREAMS = 256
# The largest frame that HTTP/2 allows: a large tensor takes fewer of them.
_FRAME_BYTES = 2**24 - 1
_READ_BYTES = 2**20
_NO_KEY = frozenset({"ServerLive", "ServerReady"})


class DescribingMethods:
    """Every method that does not compute, from parsed request to the fields of the response."""

    def __init__(
        self, pipeline: Pipeline, shared_memory: SharedMemory, service_name: str | None = None
    ) -> None:
        self._pipeline, self._service_name = pipeline, service_name
        self._memory = shared_memory
        self.methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._refuse_control,
            "RepositoryModelUnload": self._refuse_control,
        }
        for kind in get_args(Kind):
            self.methods |= {
                f"{kind.title()}SharedMemoryStatus": partial(self._region_status, kind),
                f"{kind.title()}SharedMemoryRegister": partial(self._register_region, kind),
                f"{kind.title()}SharedMemoryUnregister": partial(self._unregister_region, kind),
            }

    async def _server_live(self, _: Any, __: str) -> Fields:
        try:
            self._pipeline.require_live()
        except DeviceUnavailable:
            return {"live": False}
        return {"live": True}

    async def _server_ready(self, _: Any, __: str) -> Fields:
        return {"ready": self._pipeline.unready_reason is None}

    async def _server_metadata(self, _: Any, __: str) -> Fields:
        return server_metadata(self._memory.extensions)

    async def _model_ready(self, request: Any, owner: str) -> Fields:
        # The protocol reports an unknown model as not ready.
        try:
            if request.name != self._service_name:
                operation_named(request.name, request.version)
        except NotFound:
            return {"ready": False}
        return await self._server_ready(request, owner)

    async def _model_metadata(self, request: Any, _: str) -> Fields:
        return model_metadata(operation_named(request.name, request.version).name)

    async def _model_config(self, request: Any, _: str) -> Fields:
        return {"config": model_config(operation_named(request.name, request.version).name)}

    async def _model_statistics(self, request: Any, _: str) -> Fields:
        names = (
            [operation_named(request.name, request.version).name] if request.name else OPERATIONS
        )
        counts = await call_hub(self._pipeline.engine, RequestMetrics.statistics)
        return model_statistics(counts, names)

    async def _repository_index(self, request: Any, _: str) -> Fields:
        if request.repository_name:
            raise NotFound(
                f"there is no repository {shown(request.repository_name)}; the only one has no name"
            )
        reason = self._pipeline.unready_reason
        return {"models": repository_index(reason, only_ready=request.ready)}

    async def _refuse_control(self, _: Any, __: str) -> Fields:
        raise UnsupportedProblem(
            "models are this server's operations, which cannot be loaded or unloaded"
        )

    async def _region_status(self, kind: Kind, request: Any, owner: str) -> Fields:
        found = await self._memory.status(owner, kind, request.name)
        return {"regions": {region["name"]: region for region in found}}

    async def _register_region(self, kind: Kind, request: Any, owner: str) -> Fields:
        if kind == "cuda":
            handle, device = request.raw_handle, request.device_id
            info = RegionInfo(request.name, "", 0, request.byte_size, handle, device)
        else:
            info = RegionInfo(request.name, request.key, request.offset, request.byte_size)
        await self._memory.register(owner, info)
        return {}

    async def _unregister_region(self, kind: Kind, request: Any, owner: str) -> Fields:
        await self._memory.unregister(owner, kind, request.name)
        return {}


class GrpcServer:
    """Serves a pipeline over gRPC on the running event loop, from `start` to `stop`.

    With ``shared_port`` other sockets may listen on that port too, see `SharedPort`.
    """

    def __init__(
        self, pipeline: Pipeline, settings: Settings, shared_port: int | None = None
    ) -> None:
        self._settings, self._shared_port = settings, shared_port
        keys = KeyRing(settings.api_keys, settings.key_limits) if settings.api_keys else None
        self._traces = traces_to(settings.otlp_endpoint) if settings.otlp_endpoint else None
        self._exchanges = Exchanges(pipeline.engine, keys, self._traces)
        self.reader = MessageReader(settings)
        memory = SharedMemory(pipeline.engine, settings)
        infer = InferMethod(pipeline, settings, memory, self.reader, PendingResponses(settings))
        describing = DescribingMethods(pipeline, memory, settings.service_name)
        self._health = HealthMethods(
            pipeline, self._exchanges, MessageReader(settings, needs_key=False)
        )
        self.handlers: Mapping[str, grpc.RpcMethodHandler] = {
            **{
                f"/{SERVICE.full_name}/{name}": self._describing(name, method)
                for name, method in describing.methods.items()
            },
            f"/{SERVICE.full_name}/ModelInfer": self._exchanges.unary("ModelInfer", infer),
            f"/{SERVICE.full_name}/ModelStreamInfer": self._exchanges.streaming(
                "ModelStreamInfer", StreamMethod(infer, self._exchanges)
            ),
            **self._health.handlers,
            **reflection_handlers(self._exchanges, self.reader),
        }
        self._server: Any = None

    async def start(self) -> int:
        """Start listening, and return the port.

        Raises
        ------
        OSError
            The address or port is not available.
        """
        settings, shared_port = self._settings, self._shared_port
        handlers = [MethodHandlers(self.handlers, self._exchanges)]
        # Otherwise a port that is taken is an error.
        options = [("grpc.so_reuseport", int(shared_port is not None)), *_options(settings)]
        self._server = grpc.aio.server(handlers=handlers, options=options)
        host = settings.http_host
        address = f"{f'[{host}]' if ':' in host else host}:{shared_port or settings.grpc_port}"
        pem = newest_pem(settings)
        try:
            if pem is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _credentials(pem))
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {address}: {error}") from None
        await self._server.start()
        if self._traces is not None:
            self._traces.open()
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and end those still running after ``grace_s`` seconds."""
        if self._server is not None:
            self._health.close()
            await self._server.stop(grace_s)
            if self._traces is not None:
                await self._traces.close()

    def _describing(self, name: str, method: Method) -> grpc.RpcMethodHandler:
        described = SERVICE.methods_by_name[name]
        request_class = message(described.input_type.name)
        response_class = message(described.output_type.name)

        async def work(call: Call) -> bytes:
            # Methods without a key are answered without reading their empty message.
            body = b"" if name in _NO_KEY else await self.reader.message(call)
            fields = await method(parsed(body, request_class), call.context.owner)
            answer = ParseDict(fields, response_class(), ignore_unknown_fields=True)
            encoded: bytes = answer.SerializeToString()
            call.context.sent_bytes = len(encoded)
            return encoded

        return self._exchanges.unary(name, work)


def _options(settings: Settings) -> list[tuple[str, int]]:
    """Return grpcio's channel arguments."""

    def ms(seconds: float) -> int:
        return max(1, round(1e3 * seconds))

    return [
        ("grpc.max_receive_message_length", int(settings.grpc_max_message_bytes)),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.per_message_decompression", 0),  # see wire.py
        ("grpc.max_metadata_size", int(settings.max_header_bytes)),
        ("grpc.absolute_max_metadata_size", int(settings.max_header_bytes)),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", ms(settings.header_timeout_s)),
        # Silent connections are pinged, and closed if they do not reply.
        ("grpc.keepalive_time_ms", ms(settings.body_idle_timeout_s)),
        ("grpc.keepalive_timeout_ms", ms(settings.body_idle_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_connection_idle_ms", ms(settings.keep_alive_s)),
        ("grpc.max_connection_age_ms", ms(settings.grpc_connection_age_s)),
        ("grpc.max_connection_age_grace_ms", ms(settings.max_timeout_s)),
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
        ("grpc.experimental.tcp_read_chunk_size", _READ_BYTES),
    ]


def _credentials(newest: Callable[[], Pem]) -> grpc.ServerCredentials:
    """Make credentials that follow their files: a new connection gets the files' latest contents.

    While they are unchanged, grpcio must be given nothing new: it replaces its handshaker factory
    by every configuration that it gets, which crashes the process where many handshakes are
    pending (github.com/grpc/grpc/issues/36693).
    """
    served = newest()
    renewing = threading.Lock()  # grpcio fetches on several threads

    def configuration(pem: Pem) -> Any:
        pairs = [(pem.key, pem.certificate)]
        return grpc.ssl_server_certificate_configuration(pairs, pem.authority)

    def renewed() -> Any:
        nonlocal served
        with renewing:
            if (pem := newest()) is served:
                return None
            served = pem
        return configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        configuration(served),
        renewed,
        require_client_authentication=served.authority is not None,
    )
