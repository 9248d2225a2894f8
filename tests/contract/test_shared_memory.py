"""System shared memory through tritonclient, unchanged, over HTTP and gRPC: what it computes, whose
it is, and what a client can do to it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, shared_memory

from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import Problem
from tests.support.fake_backends import Blocking
from tests.support.kernels.harness import check, drawn
from tests.support.numerics.arrays import DTYPES, canonical, request_arrays
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case
from tests.support.numerics.one_per_rank import ONE_PER_RANK
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import until
from tests.support.triton_clients import _PROTOCOL, SHM, inputs, parameters, region

pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")
CLIENTS = {"http": http_client, "grpc": grpc_client}
PAGE = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def connected(server: OipServer, way: str) -> Iterator[Any]:
    with (
        CLIENTS[way].InferenceServerClient(getattr(server, way), concurrency=4)
        if (way == "http")
        else grpc_client.InferenceServerClient(server.grpc) as client
    ):
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture(scope="module")
def computing() -> Iterator[OipServer]:
    before = set(SHM.iterdir())
    with serving_oip(CpuBackend(), system_shared_memory=True) as server:
        yield server
    left = {path.name for path in set(SHM.iterdir()) - before}
    assert not {name for name in left if "convgrad" in name}, left


def in_regions(
    module: ModuleType, client: Any, case: Case, arrays: Mapping[str, NDArray[Any]], wanted: Any
) -> dict[str, NDArray[Any]]:
    """Infer with every tensor in one region, inputs first, each at a multiple of 64."""
    sizes = {f"in {name}": array.nbytes for name, array in arrays.items()}
    sizes |= {f"out {name}": array.nbytes for name, array in wanted.items()}
    starts, end = {}, 0
    for key, size in sizes.items():
        starts[key] = end
        end += -(-size // 64) * 64
    with region(end) as (name, handle):
        client.register_system_shared_memory(name, f"/{name}", end)
        given = []
        for tensor, array in arrays.items():
            start = starts[f"in {tensor}"]
            shared_memory.set_shared_memory_region(handle, [array.view(np.uint8)], start)
            source = module.InferInput(tensor, array.shape, _PROTOCOL[array.dtype.name])
            source.set_shared_memory(name, array.nbytes, offset=start)
            given.append(source)
        asked = []
        for tensor, array in wanted.items():
            target = module.InferRequestedOutput(tensor)
            target.set_shared_memory(name, array.nbytes, offset=starts[f"out {tensor}"])
            asked.append(target)
        result = client.infer(case.operation, given, outputs=asked, parameters=parameters(case))
        found = {}
        for tensor, array in wanted.items():
            described = result.get_output(tensor)
            described = described if isinstance(described, dict) else _as_dict(described)
            # Triton's C++ client takes any parameters for a sign of binary data.
            assert not described.get("parameters")
            assert described["shape"] == list(array.shape)
            start = starts[f"out {tensor}"]
            data = handle._mpsm_handle.buf[start : start + array.nbytes]
            found[tensor] = np.frombuffer(bytes(data), array.dtype).reshape(array.shape)
            del data
        client.unregister_system_shared_memory(name)
        return found


def _as_dict(output: Any) -> dict[str, Any]:
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in output.parameters.items()
    }
    return {"shape": list(output.shape), "parameters": parameters}


@pytest.mark.parametrize("way", CLIENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_computes_in_place(
    computing: OipServer, seed: int, dtype: str, way: str
) -> None:
    with connected(computing, way) as client:
        for case in ONE_PER_RANK:
            tensors, wanted = drawn(seed, case, dtype, "exact")
            arrays = request_arrays(case, tensors, None)
            plain = client.infer(
                case.operation, inputs(CLIENTS[way], arrays), parameters=parameters(case)
            )
            expected = {name: plain.as_numpy(name) for name in wanted}
            found = in_regions(CLIENTS[way], client, case, arrays, expected)
            for name, array in found.items():
                assert_same_bits(array, expected[name], f"{case.id} {name}")
            outputs = {
                name: canonical(case.operation, name, array, None, case.groups)
                for name, array in found.items()
            }
            check(outputs, wanted, "exact", f"seed {seed}, {case.id} {dtype}")


X = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)
POOL = {"kernel_size": 2}


def pool(
    client: Any,
    module: ModuleType,
    source: tuple[str, int],
    target: tuple[str, int] | None = None,
    size_bytes: int = X.nbytes,
) -> Any:
    """maxpool2d_fwd of an 8x8 image at a place in a region, to another, 64 bytes."""
    given = module.InferInput("input", X.shape, "FP32")
    given.set_shared_memory(source[0], size_bytes, offset=source[1])
    asked = module.InferRequestedOutput("output")
    if target is not None:
        asked.set_shared_memory(target[0], 64, offset=target[1])
    return client.infer("maxpool2d_fwd", [given], outputs=[asked], parameters=POOL)


POOLED = X.reshape(4, 2, 4, 2).max((1, 3))


@pytest.mark.parametrize("way", CLIENTS)
def test_tensors_lie_where_they_like(computing: OipServer, way: str) -> None:
    """At odd offsets, one over the other, in two regions of one file, one here and one there."""
    module = CLIENTS[way]
    with connected(computing, way) as client, region(4 * PAGE) as (name, handle):
        memory = handle._mpsm_handle.buf
        client.register_system_shared_memory(name, f"/{name}", PAGE, offset=PAGE)
        client.register_system_shared_memory("again", f"/{name}", 2 * PAGE, offset=PAGE)
        for at, to in ((0, 256), (4, 300), (3, 301), (0, 0), (64, 100), (128, 128 + 255)):
            memory[PAGE + at : PAGE + at + 256] = X.tobytes()
            for target in ((name, to), ("again", to)):
                memory[PAGE + at : PAGE + at + 256] = X.tobytes()
                pool(client, module, (name, at), target)
                written = np.frombuffer(bytes(memory[PAGE + to : PAGE + to + 64]), np.float32)
                np.testing.assert_array_equal(written.reshape(4, 4), POOLED)
        memory[PAGE : PAGE + 256] = X.tobytes()
        sent_back = pool(client, module, (name, 0)).as_numpy("output")
        np.testing.assert_array_equal(sent_back[0, 0], POOLED)
        del memory


@pytest.mark.parametrize("way", CLIENTS)
def test_refusals(computing: OipServer, way: str) -> None:
    module = CLIENTS[way]
    with connected(computing, way) as client, region(PAGE) as (name, _):

        def refused(sentence: str, ask: Any) -> None:
            with pytest.raises(InferenceServerException, match=sentence):
                ask()

        register = client.register_system_shared_memory
        refused("no region", lambda: pool(client, module, (name, 0)))
        refused("expected at least", lambda: register(name, f"/{name}", PAGE + 1))
        refused("has 0 bytes", lambda: register(name, f"/{name}", 0))
        refused("is not the name", lambda: register(name, "/../etc/passwd", 1))
        refused("cannot be opened", lambda: register(name, "/convgrad_not_there", 1))
        register(name, f"/{name}", 512)
        refused("registered already", lambda: register(name, f"/{name}", 512))
        refused("bytes 257 to 513", lambda: pool(client, module, (name, 257)))
        refused("takes 256 bytes, got 64", lambda: pool(client, module, (name, 0), None, 64))
        refused("no region", lambda: pool(client, module, (name, 0), ("other", 0)))
        refused("bytes 449 to 513", lambda: pool(client, module, (name, 0), (name, 449)))
        refused("is not enabled", lambda: client.register_cuda_shared_memory("c", b"x" * 64, 0, 1))
        pool(client, module, (name, 0), (name, 448))
        client.unregister_system_shared_memory(name)
        refused("no region", lambda: pool(client, module, (name, 0)))
        refused("no region", lambda: client.get_system_shared_memory_status(name))


@pytest.mark.parametrize("way", CLIENTS)
def test_status_lists_what_is_registered(computing: OipServer, way: str) -> None:
    with connected(computing, way) as client, region(PAGE) as (name, _):
        client.register_system_shared_memory("b", f"/{name}", 100, offset=64)
        client.register_system_shared_memory("a", f"/{name}", PAGE)
        if way == "http":
            listed = client.get_system_shared_memory_status()
            (one,) = client.get_system_shared_memory_status("b")
        else:
            listed = client.get_system_shared_memory_status(as_json=True)["regions"].values()
            one = client.get_system_shared_memory_status("b", as_json=True)["regions"]["b"]
        assert sorted(each["name"] for each in listed) == ["a", "b"]
        assert one["key"] == f"/{name}"
        assert (int(one["offset"]), int(one["byte_size"])) == (64, 100)
        client.unregister_system_shared_memory()


def test_it_is_off_unless_enabled() -> None:
    with serving_oip(CpuBackend()) as server:
        for way, module in CLIENTS.items():
            with module.InferenceServerClient(getattr(server, way)) as client:
                for ask in (
                    lambda c=client: c.register_system_shared_memory("a", "/a", 1),
                    lambda c=client: c.get_system_shared_memory_status(),
                    lambda c=client, m=module: pool(c, m, ("a", 0)),
                ):
                    with pytest.raises(InferenceServerException, match="not enabled"):
                        ask()
        assert "system_shared_memory" not in httpx.get(f"http://{server.http}/v2", timeout=60).text


def test_enabled_it_is_named_an_extension(computing: OipServer) -> None:
    assert (
        "system_shared_memory"
        in httpx.get(f"http://{computing.http}/v2", timeout=60).json()["extensions"]
    )


def test_unregistering_waits_for_the_request_that_uses_it() -> None:
    backend = Blocking()

    def ask(name: str) -> Any:
        # A client of tritonclient's belongs to the thread that made it.
        with http_client.InferenceServerClient(server.http) as client:
            return pool(client, http_client, (name, 0), (name, 512))

    def unregister(name: str) -> httpx.Response:
        url = f"http://{server.http}/v2/systemsharedmemory/region/{name}/unregister"
        return httpx.post(url, timeout=60)

    with (
        serving_oip(backend, system_shared_memory=True) as server,
        http_client.InferenceServerClient(server.http) as client,
        region(PAGE) as (name, _),
        ThreadPoolExecutor(2) as threads,
    ):
        client.register_system_shared_memory(name, f"/{name}", PAGE)
        running = threads.submit(ask, name)
        assert backend.started.acquire(timeout=60)
        leaving = threads.submit(unregister, name)
        (kept,) = server.pipeline.engine.regions._regions.values()  # type: ignore[attr-defined]
        until(lambda: bool(kept.unregistering))
        with pytest.raises(TimeoutError):
            leaving.result(0.2)
        with pytest.raises(InferenceServerException, match="no region"):
            pool(client, http_client, (name, 0))
        backend.release.set()
        running.result(60)
        assert leaving.result(60).status_code == httpx.codes.OK
        assert len(server.pipeline.engine.regions) == 0  # type: ignore[attr-defined]


class Truncates(CpuBackend):
    """Shortens a file between the moment a job begins and its kernel."""

    path: Path

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        outputs: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        os.truncate(self.path, PAGE)
        return super().run(problem, tensors, cancelled, outputs)


@pytest.mark.parametrize("inputs_last", [True, False])
def test_a_file_that_is_shortened_while_it_is_used_harms_nobody(inputs_last: bool) -> None:
    backend = Truncates()
    with (
        serving_oip(backend, system_shared_memory=True) as server,
        http_client.InferenceServerClient(server.http) as client,
        region(2 * PAGE) as (name, _),
        region(PAGE) as (other, _),
    ):
        backend.path = SHM / name
        client.register_system_shared_memory(name, f"/{name}", 2 * PAGE)
        client.register_system_shared_memory(other, f"/{other}", PAGE)
        lost, kept = (name, PAGE), (other, 0)
        source, target = (lost, kept) if inputs_last else (kept, lost)
        for sentence in ("has been shortened", "shorter than when it was registered"):
            with pytest.raises(InferenceServerException, match=sentence):
                pool(client, http_client, source, target)
        backend.path = SHM / other
        pool(client, http_client, (other, 0), (other, 512))


def test_indices_that_change_after_they_were_validated_do_no_harm(computing: OipServer) -> None:
    """A client writes nonsense over its indices all the while: each answer is right or refused."""
    grad = np.ones((1, 1, 64, 64), np.float32)
    good = np.arange(64)[:, None] * 256 + np.arange(64) * 2
    with connected(computing, "http") as client, region(good.nbytes) as (name, handle):
        client.register_system_shared_memory(name, f"/{name}", good.nbytes)
        flat = np.frombuffer(handle._mpsm_handle.buf, np.int64, good.size)
        done = threading.Event()

        def rewrite(flat: NDArray[Any]) -> None:
            while not done.is_set():
                flat[:] = good.reshape(-1)
                flat[::7] = 2**62

        writer = threading.Thread(target=rewrite, args=(flat,))
        writer.start()
        answered = refused = 0
        try:
            for _ in range(150):
                source = http_client.InferInput("grad_output", grad.shape, "FP32")
                source.set_data_from_numpy(grad)
                indices = http_client.InferInput("indices", grad.shape, "INT64")
                indices.set_shared_memory(name, good.nbytes)
                try:
                    result = client.infer(
                        "maxpool2d_bwd",
                        [source, indices],
                        parameters={"kernel_size": 2, "input_size": json.dumps([128, 128])},
                    )
                except InferenceServerException as error:
                    refused += "indices" in str(error)
                else:
                    assert result.as_numpy("grad_input").sum() == grad.size
                    answered += 1
        finally:
            done.set()
            writer.join()
            del flat
    assert refused
    assert answered + refused == 150
