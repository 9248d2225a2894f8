"""A server in a control group with little memory refuses what does not fit, and lives on."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from convgrad import Client
from convgrad.errors import Overloaded, ProblemTooLarge
from tests.support.tree_server import until

pytestmark = pytest.mark.processes

LIMIT_BYTES = 2**30
MiB = 2**20


@contextmanager
def limited_group() -> Iterator[Path]:
    """A control group of so much memory, of either version."""
    group = _made()
    if group is None:
        pytest.skip(
            "no control group can be made here: it takes root, and file systems to write to"
        )
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def _made() -> Path | None:
    name = f"convgrad-{uuid.uuid4().hex}"
    for hierarchy, file in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        group = Path("/sys/fs/cgroup") / hierarchy / name
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / file).exists():
            (group / file).write_text(str(LIMIT_BYTES))
            return group
        group.rmdir()  # the system has the other version
    return None


Server = tuple[str, "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port_file = tmp_path_factory.mktemp("memory") / "port"
    with limited_group() as group:
        # It joins the group before it becomes the server, so that all its processes are in it.
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        serve = [sys.executable, "-m", "convgrad", "serve", "--backend", "cpu"]
        serve += ["--port", "0", "--grpc-port", "0", "--port-file", str(port_file)]
        with subprocess.Popen(["sh", "-c", join, "sh", *serve], env={**os.environ}) as process:
            until(lambda: port_file.exists() or process.poll() is not None)
            assert process.poll() is None
            yield f"http://127.0.0.1:{port_file.read_text().strip()}", process
            process.terminate()
            assert process.wait(60) == 0


def test_a_request_that_does_not_fit_is_refused(
    server: Server,
) -> None:
    url, process = server
    with Client(url, max_retries=0) as client:
        with pytest.raises(ProblemTooLarge, match="requests together"):
            client.maxpool2d_fwd(np.zeros((1, 3, 8192, 8192), np.float32), 2)
        small = client.maxpool2d_fwd(np.ones((1, 1, 4, 4), np.float32), 2)
        assert small.output.shape == (1, 1, 2, 2)
    assert process.poll() is None


def test_as_many_as_fit_are_answered_and_the_others_wait_or_are_refused(
    server: Server,
) -> None:
    url, process = server
    image = np.ones((1, 1, 4096, 4096), np.float32)

    def ask(_: int) -> bool:
        with Client(url, max_retries=0, timeout=120) as client:
            try:
                return bool((client.maxpool2d_fwd(image, 4).output == 1).all())
            except Overloaded:
                return False

    with ThreadPoolExecutor(8) as pool:
        answered = sum(pool.map(ask, range(16)))
    assert answered >= 4
    assert process.poll() is None
