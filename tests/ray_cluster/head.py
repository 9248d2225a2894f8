"""The death of a cluster's head: what clients see, and recovery with a new cluster.

    python -m tests.ray_cluster.head PORT    serves on PORT; a line on stdin kills the head

This is a separate process because Ray ends processes attached to a cluster that is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import ray
from ray.cluster_utils import Cluster

import convgrad
from tests.load.served import ROOT

__all__ = ["head_death"]

ONES = np.ones((1, 1, 2, 2), np.float32)
# Timeout for requests to fail after the head's death.
NOTICED_S = 30.0


def head_death(port: int) -> float:
    """Kill the head; return the seconds until the first request fails.

    Requests before that must have correct results; after it they must fail with a connection or
    gateway error, and succeed again once a new cluster has started.
    """
    with (
        convgrad.Client(f"http://127.0.0.1:{port}", max_retries=0, timeout=20) as client,
        _cluster(port) as killed,
    ):
        assert client.conv_bwd_data(ONES, ONES).sum() == 16
        assert killed.stdin is not None
        killed.stdin.write("\n")
        killed.stdin.flush()
        began_s = time.monotonic()
        while time.monotonic() < began_s + NOTICED_S:
            try:
                assert client.conv_bwd_data(ONES, ONES).sum() == 16
            except (convgrad.ConnectionFailed, convgrad.GatewayError):
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"the head's death was not noticed in {NOTICED_S:g} s")
        failed_s = time.monotonic() - began_s
    with _cluster(port), convgrad.Client(f"http://127.0.0.1:{port}", timeout=60) as client:
        assert client.conv_bwd_data(ONES, ONES).sum() == 16
    return failed_s


@contextmanager
def _cluster(port: int) -> Iterator[subprocess.Popen[str]]:
    """Run a cluster that serves; kill all its processes when the block ends."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.ray_cluster.head", str(port)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        while not (line := process.stdout.readline()).startswith("serves "):
            assert line, "the cluster did not start"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _serve(port: int) -> None:
    from tests.ray_cluster.run import served

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "resources": {"front": 1.0}}
    )
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    with served(port):
        print(f"serves on {port}", flush=True)
        sys.stdin.readline()
        cluster.head_node.kill_gcs_server()
        cluster.head_node.kill_raylet()
        time.sleep(600)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
