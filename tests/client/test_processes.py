"""A client in other processes: after a fork, in a pickle, and its errors in one."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad import errors
from convgrad_service.backends.cpu import CpuBackend
from tests.support.awaited import CLIENTS
from tests.support.fake_server import ones
from tests.support.http_server import LiveServer, serving

HAS_SHM = Path("/dev/shm").is_dir()  # noqa: S108
SHARED = {"transport": "shm"} if HAS_SHM else {}

FORKED_CONNECTIONS = """
import os, sys, convgrad
client = convgrad.Client(sys.argv[1])

def address():
    assert client.is_live()
    [connection] = client._transport._idle
    return connection.socket.getsockname()

before = address()
child = os.fork()
if not child:
    os._exit(address() == before)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, "the child used its parent's connection"
assert address() == before, "the parent lost its connection"
client.close()
"""

FORKED_REGIONS = """
import os, sys, convgrad
client = convgrad.Client(sys.argv[1], transport="shm")
client.empty([1000])  # returned to the pool at once
child_wrote, parent_wrote = os.pipe(), os.pipe()
child = os.fork()
if not child:
    array = client.empty([1000])
    array[:] = 1
    os.write(child_wrote[1], b".")
    os.read(parent_wrote[0], 1)
    os._exit(not (array == 1).all())
os.read(child_wrote[0], 1)
client.empty([1000])[:] = 2
os.write(parent_wrote[1], b".")
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, "the parent wrote into the child's tensor"
client.close()
"""


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(CpuBackend(), system_shared_memory=True, log_level="error") as server:
        yield server


def run(script: str, url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script, url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_makes_connections_of_its_own(live: LiveServer) -> None:
    run(FORKED_CONNECTIONS, live.url)


@pytest.mark.skipif(not HAS_SHM, reason="needs /dev/shm")
def test_a_forked_child_makes_regions_of_its_own(live: LiveServer) -> None:
    run(FORKED_REGIONS, live.url)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
@pytest.mark.parametrize("make", CLIENTS, ids=["sync", "async"])
def test_a_used_client_is_copied_and_pickled(make: Any, copied: Any, live: LiveServer) -> None:
    with make(live.url, **SHARED, timeout=50) as client:
        expected = client.conv_fwd(ones(1, 1, 3), ones(1, 1, 2))
        other = copied(client)
    with other:  # open, although the client is closed
        np.testing.assert_array_equal(other.conv_fwd(ones(1, 1, 3), ones(1, 1, 2)), expected)


def test_errors_are_pickled() -> None:
    gateway = errors.GatewayError("busy", status=503, request_id="7", retry_after_s=2)
    overloaded = errors.Overloaded("busy", request_id="7", retry_after_s=2)
    for error in (gateway, overloaded, convgrad.ClientTimeout("late")):
        other = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
