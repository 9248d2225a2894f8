"""A `FakeServer` on a real loopback port, for what has to go over a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.support.fake_server import FakeServer


@contextmanager
def listening(fake: FakeServer, cut_bytes: int = 0) -> Iterator[str]:
    """The address of a server that answers as ``fake`` does, each answer short of its end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = httpx.Request(
                self.command,
                f"http://server{self.path}",
                content=body,
                headers=self.headers.items(),
            )
            reply = fake.handle(request)
            self.send_response_only(reply.status_code)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.content[: len(reply.content) - cut_bytes])
            self.close_connection = cut_bytes > 0

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    server.block_on_close = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
