"""The libraries alone: uvicorn and grpc.aio, on the ports of the command line, with a ready answer.

Both read the whole request and answer with 1 KiB: what a server built on them cannot go below.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvicorn
import uvloop

from tests.perf.serve.sizes import SIZES

METHOD = "/bare/Answer"
_ANSWER = bytes(SIZES["1 KiB"].output_bytes)
_HEADERS = [
    (b"content-type", b"application/octet-stream"),
    (b"content-length", str(len(_ANSWER)).encode()),
]


async def answer_http(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An ASGI application; its lifespan does nothing."""
    if scope["type"] == "lifespan":
        for done in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{done}.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": _ANSWER})


async def answer_grpc(_: bytes, __: Any) -> bytes:
    return _ANSWER


async def serve(http_port: int, grpc_port: int) -> None:
    """Serve both until the process is told to end."""
    handler = grpc.unary_unary_rpc_method_handler(answer_grpc)
    service = grpc.method_handlers_generic_handler(METHOD.split("/")[1], {"Answer": handler})
    server = grpc.aio.server(handlers=[service])
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    config = uvicorn.Config(
        answer_http, port=http_port, http="httptools", log_level="error", access_log=False
    )
    await uvicorn.Server(config).serve()
    await server.stop(None)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(int(sys.argv[1]), int(sys.argv[2])))
