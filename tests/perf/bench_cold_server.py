"""Requests whose kernels must be compiled first, on a server, and what they cost the others.

    python -m tests.perf.bench_cold_server [--layers 5] [--rate 200] [--seconds 6] [--phases 2]

Two rows go to tests/perf/results/cold_server.jsonl, in place of an older run's:

- ``answer``: the requests with the most kernels, sent one by one: the seconds to the answer, beside
  those that the slowest of the kernels takes to compile alone. At most 1.5x is wanted where there
  are as many free cores as kernels.
- ``beside``: latencies of warm requests, sent at random times at a given rate (tests/load), with
  four cold requests in flight throughout and with none, in turn. A p99 within 10 % is wanted.

Cold requests are drawn from the networks suite, in three dtypes, so that no two launch the same
kernel, nor one that is cached in the tree. The server has an empty cache of its own. Needs a
GPU; ``--backend cpu`` goes through the motions without one, where nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convgrad import Client
from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.compile import DEFAULT_CACHE, Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, describe
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import MAJORS, find_nvrtc
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Instance, Launch
from convgrad_service.problems import problem_from
from tests.load.mixes import requests_of
from tests.load.open_loop import Plan, run
from tests.load.served import on_cores, server, split_cores
from tests.perf.provenance import cpu_model, origin

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cold_server.jsonl"
IN_FLIGHT = 4
CLIENT_CORES = 3
DTYPES = ("bfloat16", "float32", "float16")
GRADIENTS = ("conv_bwd_data", "grouped_conv_bwd_weight")
BATCHES = (1, 2, 4, 8)
# Elements of a request's tensors, so that sending them takes little beside compiling.
MOST = 2**20


class Cold(NamedTuple):
    """A request, and the kernels that no request before it launches."""

    layer: str
    operation: str
    fields: dict[str, Any]
    kernels: tuple[Instance, ...]

    def send(self, url: str) -> float:
        """The seconds to the answer."""
        fields = {
            name: np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one
            for name, one in self.fields.items()
        }
        with Client(url, timeout=120.0, max_retries=0) as client:
            began_s = time.perf_counter()
            getattr(client, self.operation)(**fields)
            return time.perf_counter() - began_s


def fields_of(layer: dict[str, Any], batch: int, operation: str, dtype: str) -> dict[str, Any]:
    """A request's tensors, uninitialised, and parameters, channels last."""
    c, k, groups = layer["C"], layer["K"], layer["groups"]
    tensors = {
        "input": (batch, *layer["input_size"], c),
        "grad_output": (batch, *layer["output_size"], k),
        "weight": (k, *layer["kernel_size"], c // groups),
    }
    data = operation == "conv_bwd_data"
    taken = ("grad_output", "weight") if data else ("input", "grad_output")
    of = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {
        **{name: np.broadcast_to(np.ones((), of), tensors[name]) for name in taken},
        **{name: tuple(layer[name]) for name in ("stride", "padding", "dilation")},
        "groups": groups,
        "layout": "NHWC",
        "input_size" if data else "weight_size": layer["input_size" if data else "kernel_size"],
    }


def cold_requests(device: CudaDevice, compiler: Compiler) -> Iterator[Cold]:
    """Each launches kernels that are neither cached nor launched by one before it."""
    suite = json.loads((HERE / "suite" / "networks.json").read_text(encoding="utf-8"))
    layers = [layer for layer in suite if layer["kind"] == "conv" and layer["ndim"] == 2]
    seen: set[Instance] = set()
    for dtype, batch, layer, operation in product(DTYPES, BATCHES, layers, GRADIENTS):
        fields = fields_of(layer, batch, operation, dtype)
        if sum(one.size for one in fields.values() if isinstance(one, np.ndarray)) > MOST:
            continue
        request = validate(OPERATIONS[operation].request, fields)
        steps = plan_for(problem_from(operation, request), device, FAMILIES).steps
        kernels = {one.instance for one in steps if isinstance(one, Launch)}
        cached = any((DEFAULT_CACHE / compiler.file_name(one)).exists() for one in kernels)
        if not cached and not kernels & seen:
            seen |= kernels
            name = f"{layer['name']} batch {batch} {dtype}"
            yield Cold(name, operation, fields, tuple(kernels))


def answers(url: str, requests: Sequence[Cold], compiler: Compiler) -> dict[str, Any]:
    """Send cold requests one by one, then compile their kernels alone."""

    def alone_s(instance: Instance) -> float:
        began_s = time.perf_counter()
        compiler.compile(instance)
        return time.perf_counter() - began_s

    took_s = [one.send(url) for one in requests]
    warm_s = [min(one.send(url) for _ in range(3)) for one in requests]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        compiled = [[pool.submit(alone_s, each) for each in one.kernels] for one in requests]
        slowest_s = [max(each.result() for each in futures) for futures in compiled]
    each: list[dict[str, Any]] = [
        {
            "layer": one.layer,
            "op": one.operation,
            "kernels": len(one.kernels),
            "answer_s": round(answer, 3),
            "warm_s": round(warm, 3),
            "slowest_s": round(slowest, 3),
            "ratio": round(answer / slowest, 3),
        }
        for one, answer, warm, slowest in zip(requests, took_s, warm_s, slowest_s, strict=True)
    ]
    for one in each:
        print(" ".join(f"{key} {value}" for key, value in one.items()), flush=True)
    ratios = [one["ratio"] for one in each]
    return {"run": "answer", "most": max(ratios), "median": statistics.median(ratios), "each": each}


def beside(url: str, requests: Iterator[Cold], given: argparse.Namespace) -> dict[str, Any]:
    """Warm requests with cold ones beside them and without, in turn."""
    phases: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    sent = threading.Lock()
    done_s: list[float] = []

    def keep_sending(ended: threading.Event) -> None:
        while not ended.is_set():
            with sent:
                one = next(requests, None)
            if one is None:
                return  # the row says how many there were
            done_s.append(one.send(url))

    for number in range(given.phases):
        for with_cold in (False, True):
            ended = threading.Event()
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                senders = [pool.submit(keep_sending, ended) for _ in range(IN_FLIGHT) if with_cold]
                plan = Plan(url, given.mix, given.rate, given.seconds, 1.0, 2, seed=number)
                row = run(plan)
                ended.set()
                for sender in senders:
                    sender.result()
            phases[with_cold].append(row)
            figures = ", ".join(f"{name} {row[name]}" for name in ("p50_s", "p99_s", "late_p99_s"))
            print(f"cold {with_cold}: {figures}", flush=True)
    p99 = {key: statistics.median(row["p99_s"] for row in rows) for key, rows in phases.items()}
    return {
        "run": "beside",
        "mix": given.mix,
        "rate": given.rate,
        "p99_s": p99[False],
        "p99_beside_s": p99[True],
        "ratio": round(p99[True] / p99[False], 3),
        "cold_answered": len(done_s),
        "cold_median_s": round(statistics.median(done_s), 3) if done_s else None,
        "without": phases[False],
        "with": phases[True],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--layers", type=int, default=5, help="cold requests sent one by one")
    parser.add_argument("--mix", default="small")
    parser.add_argument("--rate", type=float, default=200.0, help="warm requests per second")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a phase")
    parser.add_argument("--phases", type=int, default=2, help="with cold requests, and without")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    try:
        device, nvrtc = describe(0), find_nvrtc(cuda_driver_major())
    except DeviceUnavailable:
        device, nvrtc = H200, find_nvrtc(MAJORS[0])
    compiler = Compiler(nvrtc, device.architecture, cache=None)
    requests = sorted(cold_requests(device, compiler), key=lambda one: -len(one.kernels))
    cores = len(os.sched_getaffinity(0))
    servers, clients = split_cores(CLIENT_CORES)
    with TemporaryDirectory() as cache, ExitStack() as stack:
        stack.callback(compiler.close)
        settings = {"CONVGRAD_BACKEND": given.backend, "CONVGRAD_KERNEL_CACHE": cache}
        with on_cores(servers):
            served = stack.enter_context(server(**settings))
        with Client(served.url, timeout=120.0) as client:
            for one in requests_of(given.mix):
                getattr(client, one.operation)(**one.tensors, **one.parameters)
        rows = [answers(served.url, requests[: given.layers], compiler)]
        with on_cores(clients):
            rows.append(beside(served.url, iter(requests[given.layers :]), given))
    where = origin(
        f"{device.name}, {cpu_model()}, {cores} cores",
        {"nvrtc": ".".join(map(str, nvrtc.version)), "numpy": np.__version__},
    )
    where |= {"git_sha": given.git_sha or where["git_sha"]}
    given.results.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"bench": "cold_server", **row, **where}) + "\n" for row in rows]
    given.results.write_text("".join(lines), encoding="utf-8")
    print(f"answer at most {rows[0]['most']}x its slowest kernel, median {rows[0]['median']}x")
    print(f"warm p99 {rows[1]['ratio']}x beside {IN_FLIGHT} cold requests")


if __name__ == "__main__":
    main()
