"""One GPU and several: requests side by side, one large problem over all, and the loss of a worker.

    python -m tests.perf.bench_devices

The same server with the first device alone and with all of this machine's, through shared memory: a
layer's bwd_data four calls a device in flight, and one call at a time with a batch of a gigabyte,
which is split; and that layer's weight's gradient, whose parts are added up. All answers must have
the same bits, also while a worker is killed, and no call may fail. Prints a table and writes
`tests/perf/results/devices.jsonl`: ``peer_ms`` is one device's. Needs several GPUs and CuPy.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.perf.serve.gpu_server import Loaded, Server, Way, gpu_origin, loaded, serving
from tests.perf.serve.load import layer_named

RESULTS = Path(__file__).parent / "results" / "devices.jsonl"
LAYER = "ck_headline"
# Of the problem that is split: 1 GB of tensors.
LARGE_BATCH = 512
CALLS_A_DEVICE = 4
SUM = "split sum"


def visible() -> int:
    """How many GPUs there are."""
    asked = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return len(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())


def measured(devices: int, in_flight: int, seconds: float) -> dict[str, Loaded]:
    """What is measured of a server with so many devices."""
    environment = {
        "CONVGRAD_BACKEND": "cuda",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "CONVGRAD_MAX_INFLIGHT_BYTES": "16GiB",
    }
    side_by_side = Way("shared memory, SDK", "shm", 1, in_flight // CALLS_A_DEVICE, CALLS_A_DEVICE)
    alone = Way("shared memory, SDK", "shm", 1, 1, 1)
    summed = Way("shared memory, SDK", "shm-sum", 1, 1, 1)
    with serving(environment) as server:
        found = {"side by side": loaded(server, side_by_side, LAYER, batch=None, seconds=seconds)}
        found["split"] = loaded(server, alone, LAYER, batch=LARGE_BATCH, seconds=seconds)
        found[SUM] = loaded(server, summed, LAYER, batch=LARGE_BATCH, seconds=seconds)
        if devices > 1:
            found["one killed"] = loaded(
                server,
                side_by_side,
                LAYER,
                batch=None,
                seconds=seconds + 2,
                meanwhile=lambda: _kill_one(server),
            )
    return found


def _kill_one(server: Server) -> None:
    time.sleep(0.5)
    workers = server.workers()
    print(f"workers {workers}: {workers[-1]} is killed", flush=True)
    os.kill(workers[-1], signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="that each is loaded for")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    devices = visible()
    in_flight = CALLS_A_DEVICE * devices
    one = measured(1, in_flight, given.seconds)
    all_of_them = measured(devices, in_flight, given.seconds)
    layer = layer_named(LAYER)
    stamp = gpu_origin(given.git_sha)
    lines: list[dict[str, Any]] = []
    for what, found in all_of_them.items():
        alone = one[what if what in one else "side by side"]
        spent_s = [seconds for _, seconds in found.times]
        lines.append(
            {
                "bench": "devices",
                "op": "grouped_conv_bwd_weight" if what == SUM else "conv_bwd_data",
                "layer": LAYER,
                "class": layer["class"],
                "dtype": "bfloat16",
                "layout": "NHWC",
                "what": what,
                "batch": LARGE_BATCH if what.startswith("split") else layer["N"],
                "devices": devices,
                "in_flight": 1 if what.startswith("split") else in_flight,
                "ours_ms": round(found.between_s * 1e3, 4),
                "latency_quartiles_ms": [
                    round(each * 1e3, 3) for each in statistics.quantiles(spent_s, n=4)
                ],
                "longest_ms": round(max(spent_s) * 1e3, 1),
                "peer": "the same on one device",
                "peer_ms": round(alone.between_s * 1e3, 4),
                "samples": len(found.times),
                "cpu": found.costs,
                **stamp,
            }
        )
        line = lines[-1]
        print(
            f"{what:13} {devices} devices {line['in_flight']:2} in flight: {line['ours_ms']:8.3f} "
            f"ms an answer, one device {line['peer_ms']:8.3f} "
            f"({line['peer_ms'] / line['ours_ms']:.2f}x), longest {line['longest_ms']} ms, "
            f"{line['samples']} answers",
            flush=True,
        )
        if found.sums != alone.sums:
            raise SystemExit(f"{what}: answers differ from one device's")
    given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
