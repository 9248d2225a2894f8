"""What the load tests see of a server's use of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.load.served import busy_s, cpu_s, held_bytes, on_cores, split_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and affinity are Linux'")

SPEND = """
import sys, time
while time.process_time() < 0.5:
    pass
print(flush=True)
sys.stdin.read()
"""
HAVE_IT_SPENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_what_the_children_of_a_process_take_is_counted() -> None:
    command = [sys.executable, "-c", HAVE_IT_SPENT, SPEND]
    before_s = busy_s()
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert cpu_s(parent.pid) >= 0.45
        assert busy_s() - before_s >= 0.4
        assert held_bytes(parent.pid) > 2**20
    assert cpu_s(parent.pid) == 0


def test_what_is_started_on_some_cores_stays_there() -> None:
    before = os.sched_getaffinity(0)
    show = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    for cores in split_cores():
        with on_cores(cores):
            shown = subprocess.run(show, capture_output=True, text=True, check=True).stdout
        assert shown.strip() == str(set(cores))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("cores", "server", "clients"),
    [({3}, {3}, {3}), ({0, 1}, {0}, {1}), ({0, 2, 4, 6}, {0, 2, 4}, {6})],
)
def test_clients_have_a_core_of_their_own(
    cores: set[int], server: set[int], clients: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert split_cores() == (server, clients)
