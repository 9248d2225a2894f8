"""Our server with `Sums` in it, on the ports of the command line: HTTP, gRPC."""

from __future__ import annotations

import sys

from convgrad_service.malloc import keep_large_blocks
from convgrad_service.settings import Settings


def main() -> None:
    settings = Settings(http_port=int(sys.argv[1]), log_level="error")
    keep_large_blocks(2**30)  # as `convgrad serve` does, and before anything large is imported
    from convgrad_service.http_api.app import create_app
    from convgrad_service.server import ConvgradServer, listening_socket
    from tests.perf.serve.backend import Sums

    with listening_socket(settings.http_host, settings.http_port) as listening:
        ConvgradServer(create_app(settings, Sums()), settings).run(sockets=[listening])


if __name__ == "__main__":
    main()
