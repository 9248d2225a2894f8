"""Binary HTTP through 1, 2 and 4 front-end processes: a large problem up, a larger answer down.

    python -m tests.perf.bench_front_ends

ck_headline's bwd_data (85 MB up, 165 MB down) with our SDK, two calls in flight for each front end
(``CONVGRAD_HTTP_WORKERS``), real front ends, hub and worker, and a backend that computes nothing:
what is left is the way. Clients share the machine's cores with the server. Beside it, in the same
run, the same bytes over as many bare loopback connections, one way after the other. Prints a table
and writes `tests/perf/results/front_ends.jsonl`: ``ours_ms`` is the time from one answer to the
next, ``cpu`` what one answer cost each process of the server, and all clients: a process that is
busy for all of that time bounds the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.perf.provenance import cpu_model, origin
from tests.perf.serve.bare import bare_between_s
from tests.perf.serve.gpu_server import Loaded, Server, Way, loaded
from tests.perf.serve.load import layer_named, shapes_of
from tests.perf.serve.servers import free_ports, process
from tests.perf.serve.sizes import MALLOC

RESULTS = Path(__file__).parent / "results" / "front_ends.jsonl"
LAYER = "ck_headline"
FRONT_ENDS = (1, 2, 4)
THREADS = 2
BARE_S = 2.0


def measured(front_ends: int, seconds: float, logs: Path) -> Loaded:
    """What a server with so many front ends gave."""
    http, grpc = free_ports(2)
    command = [sys.executable, "-m", "tests.perf.serve.ours", str(http), str(grpc), "nothing"]
    environment = {**os.environ, **MALLOC, "CONVGRAD_HTTP_WORKERS": str(front_ends)}
    url = f"http://127.0.0.1:{http}"
    way = Way("binary HTTP, SDK", "http", front_ends, front_ends, THREADS)
    log = logs / f"front_ends_{front_ends}.log"
    with process(command, environment, log, f"{url}/v2") as hub:
        return loaded(Server(url, hub), way, LAYER, batch=None, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="that each is loaded for")
    parser.add_argument("--front-ends", type=int, nargs="+", default=list(FRONT_ENDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--logs", type=Path, default=Path("build/front-ends"))
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    layer = layer_named(LAYER)
    moved = {name: 2 * math.prod(shape) for name, shape in shapes_of(layer).items()}
    up_bytes, down_bytes = moved["grad_output"] + moved["weight"], moved["grad_input"]
    packages = ("numpy", "uvicorn", "uvloop")
    stamp = origin(cpu_model(), {name: version(name) for name in packages})
    lines: list[dict[str, Any]] = []
    for front_ends in given.front_ends:
        peer_ms = bare_between_s(up_bytes, down_bytes, front_ends, BARE_S) * 1e3
        found = measured(front_ends, given.seconds, given.logs)
        between_s = found.between_s
        spent_s = [seconds for _, seconds in found.times]
        lines.append(
            {
                "bench": "front_ends",
                "op": "conv_bwd_data",
                "layer": LAYER,
                "class": layer["class"],
                "dtype": "bfloat16",
                "layout": "NHWC",
                "transport": "binary HTTP, SDK",
                "front_ends": front_ends,
                "in_flight": front_ends * THREADS,
                "cores": os.cpu_count(),
                "up_bytes": up_bytes,
                "down_bytes": down_bytes,
                "ours_ms": round(between_s * 1e3, 3),
                "latency_quartiles_ms": [round(q * 1e3, 2) for q in statistics.quantiles(spent_s)],
                "up_gb_per_s": round(up_bytes / between_s / 1e9, 3),
                "down_gb_per_s": round(down_bytes / between_s / 1e9, 3),
                "peer": "as many bare loopback connections",
                "peer_ms": round(peer_ms, 3),
                "reference_ms": round(peer_ms, 3),
                "samples": len(found.times),
                "cpu": found.costs,
                **stamp,
            }
        )
        last = lines[-1]
        print(
            f"{front_ends} front ends: {last['ours_ms']:8.1f} ms between answers, "
            f"{last['up_gb_per_s']:.2f} GB/s up, {last['down_gb_per_s']:.2f} GB/s down; "
            f"bare connections {peer_ms:.1f} ms; CPU ms for each: {found.said}",
            flush=True,
        )
    given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
