"""Requests whose kernels must be compiled first, on a server, and what they cost the others.

    python -m tests.perf.bench_cold_server [--layers 10] [--rate 200] [--seconds 6] [--phases 2]

Two rows go to tests/perf/results/cold_server.jsonl, in place of an older run's:

- ``answer``: requests, those with the most kernels first, sent one by one: the seconds to the
  answer, with the server's stages, beside those that the slowest of the kernels takes to compile
  afterwards, with nothing else running: alone in a process that has compiled before, as the
  server's have (``slowest_s``), and in a new one (``slowest_new_s``). At most 1.5x is wanted where
  there are as many free cores as kernels.
- ``beside``: latencies of warm requests, sent at random times at a given rate (tests/load), with
  four cold requests in flight throughout and with none, in turn. A p99 within 10 % is wanted.
  ``ran_out`` says whether there were too few cold requests.

Cold requests are drawn from the networks suite, also with smaller images, so that each launches a
kernel that none before it launches, and none that is cached in the tree. The server has an empty
cache of its own, and NVRTC's own cache is off, in the server and here. Needs a GPU;
``--backend cpu`` goes through the motions without one, where nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice, product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convgrad import Client, calls
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
from tests.load.open_loop import Plan, run, starts_in_s
from tests.load.served import on_cores, server, split_cores
from tests.perf.provenance import cpu_model, origin

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cold_server.jsonl"
IN_FLIGHT = 4
# Processes that send warm requests, a core each; and cores of those that send cold ones.
WORKERS, COLD_CORES = 2, 2
DTYPES = ("bfloat16", "float16", "float32")
PRECISIONS = {"float32": (None, "high", "highest")}
# The tensors of each operation.
TENSORS = {
    "conv_bwd_data": ("grad_output", "weight"),
    "grouped_conv_bwd_weight": ("input", "grad_output"),
    "conv_fwd": ("input", "weight"),
}
SIZES = {
    "conv_bwd_data": ("input_size", "input_size"),
    "grouped_conv_bwd_weight": ("weight_size", "kernel_size"),
}
SMALLER = (1, 2, 4, 8)
# Elements of a request and its answer, so that sending them takes little beside compiling.
MOST = 2**18
# Planning thousands of layers to find the last few would take longer than sending them.
MOST_REQUESTS = 240


class Cold(NamedTuple):
    """A request, and the kernels that it launches but no request before it."""

    layer: str
    operation: str
    fields: dict[str, Any]
    kernels: tuple[Instance, ...]

    def send(self, client: Client) -> tuple[float, dict[str, float]]:
        """The seconds to the answer, and those of the server's stages."""
        fields = {
            name: np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one
            for name, one in self.fields.items()
        }
        call = getattr(calls, self.operation)(**fields)
        began_s = time.perf_counter()
        answer = client.call(call)
        return time.perf_counter() - began_s, dict(answer.server_timing_s)


def client_of(url: str) -> Client:
    return Client(url, timeout=120.0, max_retries=0)


def smaller(layer: dict[str, Any], by: int) -> dict[str, Any]:
    """The layer on images of a fraction of the size."""
    size = [-(-one // by) for one in layer["input_size"]]
    sides = zip(
        *(layer[name] for name in ("kernel_size", "stride", "padding", "dilation")),
        size,
        strict=True,
    )
    output = [(s + 2 * p - d * (k - 1) - 1) // t + 1 for k, t, p, d, s in sides]
    name = f"{layer['name']} of 1/{by}" if by > 1 else layer["name"]
    return {**layer, "name": name, "input_size": size, "output_size": output}


def shapes_of(layer: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of one image, channels last."""
    c, k, groups = layer["C"], layer["K"], layer["groups"]
    return {
        "input": (1, *layer["input_size"], c),
        "grad_output": (1, *layer["output_size"], k),
        "weight": (k, *layer["kernel_size"], c // groups),
    }


def fields_of(
    layer: dict[str, Any], operation: str, dtype: str, precision: str | None
) -> dict[str, Any]:
    """A request's tensors, views of a single one, and parameters."""
    shapes = shapes_of(layer)
    one = np.ones((), np.dtype(getattr(ml_dtypes, dtype, dtype)))
    sizes = {field: layer[of] for field, of in [SIZES[operation]]} if operation in SIZES else {}
    return {
        **{name: np.broadcast_to(one, shapes[name]) for name in TENSORS[operation]},
        **{name: tuple(layer[name]) for name in ("stride", "padding", "dilation")},
        **({} if precision is None else {"precision": precision}),
        **sizes,
        "groups": layer["groups"],
        "layout": "NHWC",
    }


def cold_requests(device: CudaDevice, compiler: Compiler) -> Iterator[Cold]:
    """Each launches a kernel that none before it launches, and none that is cached."""
    suite = json.loads((HERE / "suite" / "networks.json").read_text(encoding="utf-8"))
    convs = [layer for layer in suite if layer["kind"] == "conv" and layer["ndim"] == 2]
    of_sizes = [smaller(layer, by) for by in SMALLER for layer in convs]
    layers = [
        layer
        for layer in of_sizes
        if min(layer["output_size"]) > 0 and sum(map(prod, shapes_of(layer).values())) <= MOST
    ]
    kinds = [(dtype, one) for dtype in DTYPES for one in PRECISIONS.get(dtype, (None,))]
    seen: set[Instance] = set()
    for (dtype, precision), layer, operation in product(kinds, layers, TENSORS):
        fields = fields_of(layer, operation, dtype, precision)
        request = validate(OPERATIONS[operation].request, fields)
        steps = plan_for(problem_from(operation, request), device, FAMILIES).steps
        kernels = {one.instance for one in steps if isinstance(one, Launch)}
        new = kernels - seen
        if new and not any((DEFAULT_CACHE / compiler.file_name(one)).exists() for one in kernels):
            seen |= new
            name = f"{layer['name']} {dtype} {precision or ''}".rstrip()
            yield Cold(name, operation, fields, tuple(new))


def answers(
    url: str, requests: Sequence[Cold], make_compiler: Callable[[], Compiler]
) -> dict[str, Any]:
    """Send cold requests one by one, then compile their kernels alone."""

    def alone_s(instance: Instance, by: Compiler) -> float:
        began_s = time.perf_counter()
        by.compile(instance)
        return time.perf_counter() - began_s

    def new_s(instance: Instance) -> float:
        with closing(make_compiler()) as new:
            return alone_s(instance, new)

    with client_of(url) as client:
        sent = [one.send(client) for one in requests]
        warm_s = [min(one.send(client)[0] for _ in range(3)) for one in requests]
    each: list[dict[str, Any]] = []
    compiler = make_compiler()
    compiler.compile(requests[0].kernels[0])
    for one, (answer_s, stages_s), warm in zip(requests, sent, warm_s, strict=True):
        slowest_s, slowest = max(
            ((alone_s(kernel, compiler), kernel) for kernel in one.kernels),
            key=lambda found: found[0],
        )
        each.append(
            {
                "layer": one.layer,
                "op": one.operation,
                "kernels": len(one.kernels),
                "answer_s": round(answer_s, 3),
                "warm_s": round(warm, 3),
                "slowest_s": round(slowest_s, 3),
                "slowest_new_s": round(new_s(slowest), 3),
                "ratio": round(answer_s / slowest_s, 3),
                "stages_s": {name: round(spent, 4) for name, spent in stages_s.items()},
            }
        )
        print(" ".join(f"{key} {value}" for key, value in each[-1].items()), flush=True)
    compiler.close()
    ratios = [one["ratio"] for one in each]
    return {"run": "answer", "most": max(ratios), "median": statistics.median(ratios), "each": each}


def beside(
    url: str, requests: Iterator[Cold], given: argparse.Namespace, cores: Set[int]
) -> dict[str, Any]:
    """Warm requests, sent from this thread's cores, with cold ones beside them, sent from others,
    and without, in turn."""
    phases: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    sent = threading.Lock()
    done_s: list[float] = []
    ran_out = False

    def keep_sending(ended: threading.Event) -> None:
        nonlocal ran_out
        os.sched_setaffinity(0, cores)  # of this thread
        with client_of(url) as client:
            ended.wait(starts_in_s(WORKERS))
            while not ended.is_set():
                with sent:
                    one = next(requests, None)
                if one is None:
                    ran_out = True
                    return
                done_s.append(one.send(client)[0])

    for number in range(given.phases):
        for with_cold in (False, True):
            ended = threading.Event()
            with ThreadPoolExecutor(IN_FLIGHT) as pool:
                senders = [pool.submit(keep_sending, ended) for _ in range(IN_FLIGHT) if with_cold]
                plan = Plan(url, given.mix, given.rate, given.seconds, 1.0, WORKERS, seed=number)
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
        "ran_out": ran_out,
        "cold_median_s": round(statistics.median(done_s), 3) if done_s else None,
        "without": phases[False],
        "with": phases[True],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--layers", type=int, default=10, help="cold requests sent one by one")
    parser.add_argument("--mix", default="small")
    parser.add_argument("--rate", type=float, default=200.0, help="warm requests per second")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a phase")
    parser.add_argument("--phases", type=int, default=2, help="with cold requests, and without")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # else NVRTC finds the kernels that it has compiled
    try:
        device, nvrtc = describe(0), find_nvrtc(cuda_driver_major())
    except DeviceUnavailable:
        device, nvrtc = H200, find_nvrtc(MAJORS[0])

    def make_compiler() -> Compiler:
        return Compiler(nvrtc, device.architecture, cache=None)

    found = islice(cold_requests(device, make_compiler()), MOST_REQUESTS)
    requests = sorted(found, key=lambda one: -len(one.kernels))
    cores = len(os.sched_getaffinity(0))
    servers, clients = split_cores(WORKERS + COLD_CORES)
    warm, cold = set(sorted(clients)[:WORKERS]), set(sorted(clients)[WORKERS:]) or clients
    with TemporaryDirectory() as cache, ExitStack() as stack:
        settings = {"CONVGRAD_BACKEND": given.backend, "CONVGRAD_KERNEL_CACHE": cache}
        with on_cores(servers):
            served = stack.enter_context(server(**settings))
        with Client(served.url, timeout=120.0) as client:
            for one in requests_of(given.mix):
                getattr(client, one.operation)(**one.tensors, **one.parameters)
        rows = [answers(served.url, requests[: given.layers], make_compiler)]
        with on_cores(warm):
            rows.append(beside(served.url, iter(requests[given.layers :]), given, cold))
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
