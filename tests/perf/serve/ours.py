"""Our server, all its processes, on the ports of the command line; in its worker `Sums`, or the
backend that is named there too. What is small it computes on the spot, unless a last word says
that all is to be computed ``by-workers``."""

from __future__ import annotations

import sys
from functools import partial

import uvloop

from convgrad_service.engine.options import InlineBackend, WorkerRecipe
from convgrad_service.server.composition import prepare_process
from convgrad_service.server.http_server import listening_socket
from convgrad_service.server.process_tree import ProcessTree, run_until_signalled
from convgrad_service.server.settings import Settings
from tests.perf.serve.backend import BACKENDS

BY_WORKERS = "by-workers"


def main() -> None:
    settings = Settings(
        http_port=int(sys.argv[1]),
        grpc_port=int(sys.argv[2]),
        system_shared_memory=True,
        log_level="error",
    )
    named = [word for word in sys.argv[3:] if word != BY_WORKERS]
    backend = BACKENDS[named[0] if named else "sums"]
    beside = (
        None if sys.argv[-1] == BY_WORKERS else InlineBackend(backend(0).name, partial(backend, 0))
    )
    prepare = partial(prepare_process, settings)
    prepare()
    recipe = WorkerRecipe(backend, settings.compute_slots, prepare, beside)
    with listening_socket(settings.http_host, settings.http_port) as listening:
        tree = ProcessTree(settings, listening, recipe)
        uvloop.run(run_until_signalled(tree, lambda port: None))


if __name__ == "__main__":
    main()
