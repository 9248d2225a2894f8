"""Tests the Ray Serve application on a local cluster of simulated nodes: correctness, autoscaling,
throughput, overhead, and the death of a node and of the head.

    python -m tests.ray_cluster.run [--nodes 3] [--only autoscaling death] [--store]

Results of split problems are compared with the CPU backend's. The contract tests of every operation
and dtype, and a load test with Locust, run against the application. Replicas must be added under
load and removed afterwards. No request may fail when a node is killed under load. `--store` stores
the figures for docs/load.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import ray
import yaml
from numpy.typing import NDArray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema

import convgrad
from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.grpc_api.wire import SERVICE, message
from convgrad_service.problems import problem_from, run_in_pieces
from convgrad_service.server import ray_serve
from convgrad_service.server.ray_serve import Compute, application
from tests.load.results import store
from tests.load.run import locust
from tests.load.served import ROOT, Served, server
from tests.ray_cluster.costs import costs
from tests.ray_cluster.devices import DEVICE_S, Waiting
from tests.ray_cluster.head import head_death
from tests.ray_cluster.load import Load, throughput

Array = NDArray[np.float32]
CONFIGURATION = ROOT / "deploy" / "ray" / "serve.yaml"
# Small enough that the examples below are split.
PIECE_BYTES = 2**20
SETTINGS = {"threads": 1, "backend": "cpu", "log_level": "error"}
# For throughput: a problem of 10 GFLOP and 9.6 MB, and a small one.
HEAVY, SMALL = (8, 128, 28, 7), (1, 32, 28, 3)
# Numbers of replicas with their own simulated device.
OWN = (1, 2, 4)
LOAD_USERS, LOAD_S = 4, 12
RUNS = ("answers", "contract", "load", "autoscaling", "measured", "proxies", "death", "head")
# Timeout for replicas to be added or removed.
SCALING_S = 60.0


@contextmanager
def served(
    port: int,
    replica: type[Compute] = Compute,
    *,
    proxy_location: str = "HeadOnly",
    **options: Any,
) -> Iterator[str]:
    """Deploy the application on the cluster that this process has joined; yield its URL."""
    ray_serve.Compute = replica  # type: ignore[misc]
    functions = ["convgrad_service.server.ray_grpc.add_open_inference"]
    serve.start(
        proxy_location=proxy_location,
        http_options={"host": "127.0.0.1", "port": port},
        grpc_options={"port": port + 1, "grpc_servicer_functions": functions},
    )
    arguments = {
        "settings": SETTINGS,
        "front_resources": {"front": 0.1},
        "anonymous": True,
        **options,
    }
    serve.run(application(arguments), name="convgrad", route_prefix="/")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.delete("convgrad")


def replicas() -> int:
    """Return the number of running replicas."""
    states = serve.status().applications["convgrad"].deployments[Compute.__name__].replica_states
    return int(states.get("RUNNING", 0))


def answers(port: int, nodes: int) -> list[dict[str, Any]]:
    """Check that results of split problems are bitwise identical to one backend's.

    Also validates the Serve configuration against Ray's schema.
    """
    ServeDeploySchema.model_validate(yaml.safe_load(CONFIGURATION.read_text()))
    backend = CpuBackend(threads=1)
    rng = np.random.default_rng(0)
    fixed = {"min_replicas": nodes, "max_replicas": nodes, "piece_bytes": PIECE_BYTES}
    with served(port, **fixed) as url, convgrad.Client(url, timeout=120) as client:
        listed = client.operations()
        assert set(listed) == set(OPERATIONS), "the list of operations differs"
        x = rng.standard_normal((6, 32, 48, 48), dtype=np.float32)
        dy = rng.standard_normal((6, 24, 48, 48), dtype=np.float32)
        w = rng.standard_normal((24, 32, 3, 3), dtype=np.float32)
        calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("conv_fwd", {"input": x, "weight": w}, {"padding": 1}),
            ("conv_bwd_data", {"grad_output": dy, "weight": w}, {"padding": 1}),
            ("grouped_conv_bwd_weight", {"input": x, "grad_output": dy}, {"padding": 1}),
            ("maxpool2d_fwd", {"input": x}, {"kernel_size": 2}),
        ]
        for operation, tensors, parameters in calls:
            if operation == "grouped_conv_bwd_weight":
                parameters = {**parameters, "weight_size": (3, 3)}
            request = validate(OPERATIONS[operation].request, {**tensors, **parameters})
            problem = problem_from(operation, request)
            parts = -(-problem.memory_bytes // PIECE_BYTES)
            assert parts > 1, operation
            wanted = run_in_pieces(
                problem, tensors, parts, lambda part, own: backend.run(part, own).outputs
            )
            found = getattr(client, operation)(**tensors, **parameters)
            (first, *_) = found if isinstance(found, tuple) else (found,)
            (name, *_) = wanted
            np.testing.assert_array_equal(first, wanted[name], err_msg=operation)
            print(
                f"  {operation}: {len(problem.split(parts))} pieces, bitwise identical", flush=True
            )
        refused = _refused(lambda: client.conv_fwd(x, w[:, :5]))
        assert "weight" in refused, refused
        wanted = client.conv_fwd(x, w, padding=1)
        _same_over_grpc(f"127.0.0.1:{port + 1}", x, w, wanted)
    return []


def _same_over_grpc(address: str, x: Array, w: Array, wanted: Array) -> None:
    """Check that results through Ray's gRPC proxy are identical, and errors have their status."""
    asked = message("ModelInferRequest")(model_name="conv_fwd")
    asked.parameters["padding"].int64_param = 1
    for name, array in (("input", x), ("weight", w)):
        asked.inputs.add(name=name, datatype="FP32", shape=array.shape)
        asked.raw_input_contents.append(array.tobytes())
    options = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
    with grpc.insecure_channel(address, options) as channel:

        def call(method: str, request: Any) -> bytes:
            path = f"/{SERVICE.full_name}/{method}"
            answer: bytes = channel.unary_unary(path)(request.SerializeToString(), timeout=120)
            return answer

        ready = message("ServerReadyResponse").FromString(
            call("ServerReady", message("ServerReadyRequest")())
        )
        assert ready.ready
        found = message("ModelInferResponse").FromString(call("ModelInfer", asked))
        assert found.raw_output_contents[0] == wanted.tobytes()
        del asked.inputs[1], asked.raw_input_contents[1]
        refusal: Any = None
        try:
            call("ModelInfer", asked)
        except grpc.RpcError as error:
            refusal = error
    assert refusal is not None, "a request without its weight was answered"
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT, refusal
    assert "weight" in refusal.details(), refusal
    print("  gRPC through Ray's proxy: bitwise identical", flush=True)


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except convgrad.InvalidProblem as error:
        return str(error)
    return "an invalid request was answered"


def contract(port: int, nodes: int, pytest: Path) -> list[dict[str, Any]]:
    """Run the contract tests of every operation against the application."""
    fixed = {"min_replicas": nodes, "max_replicas": nodes}
    tests = "tests/contract/test_operations_computed.py"
    with served(port, **fixed) as url:
        command = [str(pytest), "-q", "-p", "no:cacheprovider", tests, "--url", url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(f"  {done.stdout.splitlines()[-1]}", flush=True)
    return []


def loaded(port: int, nodes: int, program: Path) -> list[dict[str, Any]]:
    """Load the application with Locust; no request may fail."""
    fixed = {"min_replicas": nodes, "max_replicas": nodes}
    rows = []
    with served(port, **fixed) as url:
        here = Served(url, grpc="", process=os.getpid())
        length = ["-u", str(LOAD_USERS), "-r", str(LOAD_USERS), "-t", f"{LOAD_S}s"]
        users = ["SafetensorsUser", "JsonUser"]
        found = locust(program, here, "ray", "--mix", "resnet50", *length, *users)
    for wire in ("safetensors", "json"):
        row = {"load": "resnet50", "wire": wire, "users": LOAD_USERS, "seconds": LOAD_S}
        rows.append({**row, **found[wire]})
        print(
            f"  {wire}: {found[wire]['answered']} answered, {found[wire]['failed']} failed",
            flush=True,
        )
        assert found[wire]["answered"], f"{wire}: nothing was answered"
        assert not found[wire]["failed"], found[wire]["first_failure"]
    return rows


def autoscaling(port: int, nodes: int) -> list[dict[str, Any]]:
    """Check that replicas are added under load and removed afterwards."""
    began_s = time.monotonic()
    rows: list[dict[str, Any]] = []

    def record(what: str) -> None:
        rows.append(
            {"scaling": what, "at_s": round(time.monotonic() - began_s, 1), "replicas": replicas()}
        )
        print(f"  {rows[-1]['at_s']:5.1f} s: {what}, {rows[-1]['replicas']} replicas", flush=True)

    def until(wanted: int) -> None:
        end_s = time.monotonic() + SCALING_S
        while replicas() != wanted:
            assert time.monotonic() < end_s, f"{replicas()} replicas, expected {wanted}"
            time.sleep(0.25)

    options = {"min_replicas": 1, "max_replicas": 2, "downscale_delay_s": 5.0}
    with served(port, **options) as url:
        until(1)
        began_s = time.monotonic()
        record("none")
        with Load(url, clients=6, shape=HEAVY) as load:
            until(2)
            record("six clients")
        assert not load.failed, load.failed[:3]
        record("stopped")
        until(1)
        record("none for 5 s or more")
    assert [row["replicas"] for row in rows] == [1, 2, 2, 1]
    return rows


def measured(port: int, nodes: int) -> list[dict[str, Any]]:
    """Measure throughput by number of replicas, and the overhead of the path to them."""
    rows: list[dict[str, Any]] = []
    for device, count in [*(("cpu", n) for n in range(1, nodes + 1)), *(("own", n) for n in OWN)]:
        own = device == "own"
        fixed = {"min_replicas": count, "max_replicas": count}
        options = {**fixed, "cpus_per_replica": 0.2} if own else fixed
        with served(port, Waiting if own else Compute, **options) as url:
            rate = throughput(url, 2 * count + 2, 5.0, SMALL if own else HEAVY)
            row = {"throughput": device, "replicas": count, "answered_per_s": rate}
            rows.append({**row, "device_s": DEVICE_S} if own else row)
            print(
                f"  {count} replicas, {device}: {rate:.1f} requests/s, {os.cpu_count()} cores",
                flush=True,
            )
            if not rows[1:]:
                with server(CONVGRAD_THREADS="1", CONVGRAD_BACKEND="cpu") as plain:
                    rows += costs(url, plain.url)
    for row in rows:
        if "cost" in row:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def proxies(port: int, nodes: int) -> list[dict[str, Any]]:
    """Run a proxy on every node, as deploy/ray/serve.yaml does; connections to all are answered.

    The simulated nodes share this machine's port, so that its system spreads the connections.
    """
    serve.shutdown()  # the proxies' location is fixed when Serve starts
    fixed = {"min_replicas": nodes, "max_replicas": nodes}
    ones = np.ones((1, 1, 2, 2), np.float32)
    with served(port, proxy_location="EveryNode", **fixed) as url:
        end_s = time.monotonic() + SCALING_S
        while list(serve.status().proxies.values()).count("HEALTHY") < nodes + 1:
            assert time.monotonic() < end_s, serve.status().proxies
            time.sleep(0.5)
        listening = _listeners(port)
        assert listening == nodes + 1, f"{listening} proxies listen, expected {nodes + 1}"
        for _ in range(16 * (nodes + 1)):
            with convgrad.Client(url, max_retries=0, timeout=60) as client:
                assert client.conv_bwd_data(ones, ones).sum() == 16
    serve.shutdown()
    print(f"  {listening} proxies, one on each node, all answer", flush=True)
    return []


def _listeners(port: int) -> int:
    """Return how many sockets listen on a port of this machine."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and row[1].endswith(f":{port:04X}") for row in rows)


def death(port: int, nodes: int, cluster: Cluster, victim: Any) -> list[dict[str, Any]]:
    """Kill a node under load; no request may fail."""
    fixed = {"min_replicas": nodes, "max_replicas": nodes}
    with served(port, **fixed) as url, Load(url, clients=4) as load:
        time.sleep(3)
        load.wait_for(20)
        cluster.remove_node(victim, allow_graceful=False)
        # Long enough for its problems to be sent again.
        time.sleep(8)
        load.wait_for(load.answered + 20)
    assert not load.failed, f"{len(load.failed)} requests failed: {load.failed[:3]}"
    print(f"  a node of {nodes} killed under load: {load.answered} answered, 0 failed")
    return [{"death": True, "nodes": nodes, "answered": load.answered, "failed": 0}]


def head(port: int) -> list[dict[str, Any]]:
    """Kill the head: requests fail until a new cluster has started."""
    failed_s = head_death(port)
    print(f"  head killed: requests failed after {failed_s:.1f} s, until a new one had started")
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n")[:2]))
    parser.add_argument(
        "--nodes", type=int, default=3, help="number of compute nodes, one CPU each"
    )
    parser.add_argument("--only", nargs="+", choices=RUNS, default=RUNS, help="run only these")
    parser.add_argument("--pytest", type=Path, default=ROOT / ".venv/bin/pytest")
    parser.add_argument("--locust", type=Path, default=ROOT / "build/load-tools/bin/locust")
    parser.add_argument("--store", action="store_true", help="store the figures as results")
    asked = parser.parse_args()
    # By default Ray runs its workers at a lower priority than this program's clients.
    os.environ.setdefault("RAY_worker_niceness", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "resources": {"front": 1.0}}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(asked.nodes)]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    # Chosen after Ray's own processes have taken their ports.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "answers": lambda: answers(port, asked.nodes),
        "contract": lambda: contract(port, asked.nodes, asked.pytest),
        "load": lambda: loaded(port, asked.nodes, asked.locust),
        "autoscaling": lambda: autoscaling(port, asked.nodes),
        "measured": lambda: measured(port, asked.nodes),
        "proxies": lambda: proxies(port, asked.nodes),
        "death": lambda: death(port, asked.nodes, cluster, nodes[-1]),
        "head": lambda: head(port + 2),
    }
    try:
        for name, run in runs.items():
            if name in asked.only:
                print(f"{name}:", flush=True)
                rows = run()
                if asked.store and rows:
                    store(f"ray {name}", rows, ["ray", "numpy"])
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
