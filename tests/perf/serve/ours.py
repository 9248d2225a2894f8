"""Our server, all its processes, on the ports of the command line; in its worker `Sums`, or the
backend that is named there too. What is small it computes on the event loop, unless a word says
that all is to be computed ``by-workers``. ``--without NAME`` takes out one of its `SHORTCUTS`."""

from __future__ import annotations

import argparse
from functools import partial

import uvloop

from convgrad_service.engine.options import InlineBackend, WorkerRecipe
from convgrad_service.server.composition import prepare_process
from convgrad_service.server.http_server import listening_socket
from convgrad_service.server.process_tree import ProcessTree, run_until_signalled
from convgrad_service.server.settings import Settings
from tests.perf.serve.backend import BACKENDS
from tests.perf.serve.shortcuts import SHORTCUTS

BY_WORKERS = "by-workers"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("http_port", type=int)
    parser.add_argument("grpc_port", type=int)
    parser.add_argument("words", nargs="*", choices=[*BACKENDS, BY_WORKERS], default="sums")
    parser.add_argument("--without", choices=SHORTCUTS)
    given = parser.parse_args()
    if given.without is not None:
        SHORTCUTS[given.without].remove()
    settings = Settings(
        http_port=given.http_port,
        grpc_port=given.grpc_port,
        system_shared_memory=True,
        log_level="error",
    )
    (make,) = [BACKENDS[word] for word in given.words if word in BACKENDS] or [BACKENDS["sums"]]
    beside = None if BY_WORKERS in given.words else InlineBackend(make(0).name, partial(make, 0))
    prepare = partial(prepare_process, settings)
    prepare()
    recipe = WorkerRecipe(make, settings.compute_slots, prepare, beside)
    with listening_socket(settings.http_host, settings.http_port) as listening:
        tree = ProcessTree(settings, listening, recipe)
        uvloop.run(run_until_signalled(tree, lambda port: None))


if __name__ == "__main__":
    main()
