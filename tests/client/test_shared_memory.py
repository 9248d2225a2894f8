"""`Client(transport="shm")`: the same answers, from the caller's own memory, and nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad._call import make_call
from convgrad.contract import OPERATIONS
from convgrad_service.backends.cpu import CpuBackend
from tests.support.awaited import CLIENTS
from tests.support.examples import example
from tests.support.fake_backends import Blocking
from tests.support.fake_server import ones
from tests.support.http_server import LiveServer, serving
from tests.support.tree_server import until

SHM = Path("/dev/shm")  # noqa: S108 - what is tested
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(CpuBackend(), system_shared_memory=True, log_level="error") as server:
        yield server


@pytest.fixture(params=CLIENTS, ids=["sync", "async"])
def client(live: LiveServer, request: pytest.FixtureRequest) -> Iterator[convgrad.Client]:
    before = len(regions(live))
    with request.param(live.url, transport="shm") as client:
        yield client
    until(lambda: len(regions(live)) <= before)
    assert not list(SHM.glob(f"convgrad-{os.getpid()}-*"))


def regions(live: LiveServer) -> Any:
    return live.pipeline.engine.regions  # type: ignore[attr-defined]


def in_region(client: convgrad.Client, array: Any) -> bool:
    assert client._shared is not None
    return client._shared._pool.place_of(array) is not None


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_answers_as_over_http(
    name: str, client: convgrad.Client, live: LiveServer
) -> None:
    call = make_call(name, example(name), dict)
    with convgrad.Client(live.url) as plain:
        expected = plain.call(call)
    for turn in range(3):
        answer = client.call(call)
        assert answer.outputs.keys() == expected.outputs.keys()
        for output, array in answer.outputs.items():
            np.testing.assert_array_equal(array, expected.outputs[output])
            assert array.dtype == expected.outputs[output].dtype
            assert array.flags.writeable
            assert array.flags.aligned
            assert in_region(client, array) == (turn > 0)
        assert answer.report.kernel == expected.report.kernel
        assert answer.report.flops == expected.report.flops
        assert "compute" in answer.server_timing_s


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_survive(dtype: Any, client: convgrad.Client) -> None:
    given = np.arange(8).reshape(1, 1, 8).astype(dtype)
    for _ in range(2):
        output = client.conv_fwd(given, ones(1, 1, 1, dtype=dtype))
        np.testing.assert_array_equal(output, given)
        assert output.dtype == given.dtype


def test_results_stay_while_they_are_used(client: convgrad.Client) -> None:
    x, weight = ones(1, 1, 1000), ones(1, 1, 1)
    kept = [client.conv_fwd(x * turn, weight)[:, :, ::2] for turn in range(20)]
    for turn, array in enumerate(kept):
        assert (array == turn).all()
    assert all(in_region(client, array) for array in kept[1:])


def test_a_result_is_verified_in_shared_memory(client: convgrad.Client, live: LiveServer) -> None:
    layer = "mb2ic8ih9oc8oh9kh3ph1"
    x, weight = (
        convgrad.check.draw(name, shape, "float32", seed=3)
        for name, shape in (("input", (2, 8, 9, 9)), ("weight", (8, 8, 3, 3)))
    )
    y = client.empty((2, 8, 9, 9))
    y[...] = client.conv_fwd(x, weight, padding=1)
    found = client.verify("conv_fwd", y, second=y, weight=weight, layer=layer, seed=3)
    assert found.passed
    assert set(found.again.fields["shared_memory"]) == {
        "result_output", "second_output", "weight"
    }  # fmt: skip
    with convgrad.Client(live.url) as plain:
        sent = plain.verify("conv_fwd", y, weight=weight, layer=layer, seed=3)
    assert sent.inputs.digest == found.inputs.digest
    y[1, 2, 3, 4] += 1
    wrong = client.verify("conv_fwd", y, layer=layer, seed=3)
    assert wrong.outputs["output"].worst.index == (1, 2, 3, 4)
    with pytest.raises(convgrad.InvalidProblem, match="result_output is float32 of shape"):
        client.verify("conv_fwd", y[:1].copy(), layer=layer, seed=3)


def test_regions_are_used_again(client: convgrad.Client, live: LiveServer) -> None:
    x, weight = ones(1, 1, 100_000), ones(1, 1, 1)
    for _ in range(30):
        client.conv_fwd(x, weight)
    assert len(regions(live)) <= 3


def test_what_lies_in_shared_memory_is_sent_from_there(client: convgrad.Client) -> None:
    x = client.empty((1, 1, 50), "float32")
    assert in_region(client, x)
    x[:] = np.arange(50)
    weight = ones(1, 1, 1)
    client.conv_fwd(x, weight)
    first = client.conv_fwd(x, weight)
    second = client.conv_fwd(first[:, :, 3:], weight)
    np.testing.assert_array_equal(second, x[:, :, 3:])
    with pytest.raises(convgrad.MalformedRequest, match="dtype"):
        client.empty((3,), np.complex64)
    assert client.empty(5).shape == (5,)
    assert client.empty((0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="non-negative"):
        client.empty((-1, 3))


def test_more_results_than_regions_are_copied(
    client: convgrad.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convgrad._shared_regions._MOST_IN_USE", 4)
    kept = [client.conv_fwd(ones(1, 1, 4) * turn, ones(1, 1, 1)) for turn in range(10)]
    assert [array.max() for array in kept] == list(range(10))
    assert sum(in_region(client, array) for array in kept) < 6


def test_refusals_are_the_servers(client: convgrad.Client) -> None:
    for _ in range(3):
        with pytest.raises(convgrad.InvalidProblem):
            client.conv_fwd(ones(1, 3, 4), ones(1, 2, 1))
    assert client.conv_fwd(ones(1, 1, 4), ones(1, 1, 1)).sum() == 4


def test_threads_share_a_client(client: convgrad.Client) -> None:
    def ask(value: int) -> bool:
        return bool((client.conv_fwd(ones(1, 1, 64) * value, ones(1, 1, 1)) == value).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(60)))


def test_a_server_that_was_restarted_is_told_anew(live: LiveServer) -> None:
    x, weight = ones(1, 1, 8), ones(1, 1, 1)
    with convgrad.Client(live.url, transport="shm") as client:
        client.conv_fwd(x, weight)
        kept = client.conv_fwd(x, weight)
        for region in list(regions(live)._regions.values()):  # as a new process would be
            regions(live)._close(region)
        np.testing.assert_array_equal(client.conv_fwd(kept, weight), x)
        np.testing.assert_array_equal(client.conv_fwd(x, weight), x)


def test_a_region_that_the_server_may_still_write_is_not_used_again() -> None:
    backend = Blocking()
    x, weight = ones(1, 1, 8), ones(1, 1, 1)
    with (
        serving(backend, system_shared_memory=True, log_level="error") as server,
        convgrad.Client(server.url, transport="shm", max_retries=0) as client,
    ):
        backend.release.set()
        client.conv_fwd(x, weight)
        client.conv_fwd(x, weight)
        assert client._shared is not None
        pool = client._shared._pool
        backend.release.clear()
        with pytest.raises((convgrad.ClientTimeout, convgrad.DeadlineExceeded)):
            client.with_options(timeout=0.5).conv_fwd(x, weight)
        assert len(pool._dropped) == 2
        backend.release.set()
        client.conv_fwd(x, weight)
        assert not set(pool._dropped) & set(pool._regions)


def test_a_server_without_it_says_so() -> None:
    with (
        serving(Blocking(), log_level="error") as server,
        convgrad.Client(server.url, transport="shm") as client,
        pytest.raises(convgrad.UnsupportedProblem, match="CONVGRAD_SYSTEM_SHARED_MEMORY=true"),
    ):
        client.conv_fwd(ones(1, 1, 4), ones(1, 1, 1))
    assert not list(SHM.glob(f"convgrad-{os.getpid()}-*"))


def test_a_client_that_is_killed_leaves_nothing(live: LiveServer) -> None:
    code = f"""
import os, numpy as np, convgrad
client = convgrad.Client("{live.url}", transport="shm")
x = np.ones((1, 1, 8), np.float32)
results = [client.conv_fwd(x, x[:, :, :1]) for _ in range(3)]
print(os.getpid(), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    left = f"convgrad-{int(done.stdout)}-"
    assert not list(SHM.glob(f"{left}*"))
    assert any(name.startswith(left) for _, name in regions(live)._regions)
    with convgrad.Client(live.url, transport="shm") as client:
        client.conv_fwd(ones(1, 1, 4), ones(1, 1, 1))
        assert not any(name.startswith(left) for _, name in regions(live)._regions)


def test_no_memory_is_an_error_and_not_a_signal(
    client: convgrad.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(convgrad.errors.ClientError, match="No space left"):
        client.conv_fwd(ones(1, 1, 4), ones(1, 1, 1))


def test_transport_is_http_or_shm() -> None:
    with pytest.raises(ValueError, match='transport: expected "http" or "shm", got \'rdma\''):
        convgrad.Client(transport="rdma")
    with convgrad.Client() as client:
        assert client.empty((2, 3), "float16").shape == (2, 3)
