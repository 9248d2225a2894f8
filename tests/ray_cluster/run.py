"""A local Ray cluster of several simulated nodes: right answers, a node killed under load, scaling.

    python -m tests.ray_cluster.run [--nodes 3]

Every operation's answer is compared with the CPU backend's, whole and cut into pieces; then a node
is killed while clients send, and no request may fail. Prints how throughput grows with replicas.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.cluster_utils import Cluster

import convgrad
from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import problem_from, run_in_pieces
from convgrad_service.ray_serve import application

# Of tensors: small enough that the examples below are cut.
PIECE_BYTES = 2**20
SETTINGS = {"threads": 1, "backend": "cpu", "log_level": "error"}


@contextmanager
def served(port: int, **options: Any) -> Iterator[str]:
    """The application on the cluster that this process has joined."""
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    arguments = {"settings": SETTINGS, "front_resources": {"front": 0.1}, **options}
    serve.run(application(arguments), name="convgrad", route_prefix="/")
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.delete("convgrad")


def operations_agree(url: str) -> None:
    """The examples of the contract, and a larger problem that is cut into pieces."""
    backend = CpuBackend(threads=1)
    rng = np.random.default_rng(0)
    with convgrad.Client(url, timeout=120) as client:
        listed = client.operations()
        assert set(listed) == set(OPERATIONS), "the catalogue names other operations"
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
                f"  {operation}: {len(problem.split(parts))} pieces, equal to the bit", flush=True
            )
        refused = _refused(lambda: client.conv_fwd(x, w[:, :5]))
        assert "weight" in refused, refused


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except convgrad.InvalidProblem as error:
        return str(error)
    return "a wrong request was answered"


@dataclass
class Load:
    """Clients that send one problem after another and check every answer."""

    url: str
    clients: int
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        rng = np.random.default_rng(1)
        self._dy = rng.integers(-2, 3, (4, 32, 28, 28)).astype(np.float32)
        self._w = rng.integers(-2, 3, (32, 32, 3, 3)).astype(np.float32)
        with convgrad.Client(self.url, timeout=120) as client:
            self._wanted = client.conv_bwd_data(self._dy, self._w, padding=1)
        self._threads = [threading.Thread(target=self._send) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        # Without retries: what is counted is what the service lost.
        with convgrad.Client(self.url, timeout=120, retries=0) as client:
            while not self._stop.is_set():
                try:
                    found = client.conv_bwd_data(self._dy, self._w, padding=1)
                except convgrad.ConvgradError as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                    continue
                if not np.array_equal(found, self._wanted):
                    self.failed.append("a wrong answer")
                self.answered += 1


def throughput(url: str, clients: int, seconds: float) -> float:
    """Answers a second."""
    with Load(url, clients) as load:
        time.sleep(1)
        before, started = load.answered, time.monotonic()
        time.sleep(seconds)
        rate = (load.answered - before) / (time.monotonic() - started)
    assert not load.failed, load.failed[:3]
    return rate


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=3, help="nodes that compute, one CPU each")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "resources": {"front": 1.0}}
    )
    nodes = [cluster.add_node(num_cpus=1) for _ in range(asked.nodes)]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    try:
        for count in range(1, asked.nodes + 1):
            with served(port, min_replicas=count, max_replicas=count) as url:
                rate = throughput(url, 2 * count + 2, asked.seconds)
                print(
                    f"{count} replicas: {rate:.1f} answers/s on {os.cpu_count()} cores", flush=True
                )
        fixed = {"min_replicas": asked.nodes, "max_replicas": asked.nodes}
        with served(port, piece_bytes=PIECE_BYTES, **fixed) as url:
            operations_agree(url)
        with served(port, **fixed) as url, Load(url, clients=4) as load:
            time.sleep(3)
            before = load.answered
            cluster.remove_node(nodes[-1], allow_graceful=False)
            time.sleep(8)
            after = load.answered
        assert not load.failed, f"{len(load.failed)} requests failed: {load.failed[:3]}"
        assert after > before > 0, "nothing was answered after the node had died"
        print(f"a node of {asked.nodes} killed under load: {load.answered} answered, 0 failed")
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
