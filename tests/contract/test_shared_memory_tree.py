"""System shared memory through all of a server's processes: whose a region is, whichever front end
it was told, what asyncio's clients do with it, and that a client's tricks end no process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException, shared_memory

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.security.keys import hash_of, new_key
from tests.support.tree_server import TreeServer, serving_tree
from tests.support.triton_clients import SHM, region

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")]
X = np.random.default_rng(0).standard_normal((1, 4, 64, 64), np.float32)
POOLED = X.reshape(1, 4, 32, 2, 32, 2).max((3, 5))
CLIENTS = {"http": http_client, "grpc": grpc_client}
# Of a region: what goes in, then what comes out.
SIZE_BYTES = X.nbytes + POOLED.nbytes


def cpu(_: int) -> CpuBackend:
    return CpuBackend(threads=1)


@pytest.fixture(scope="module")
def keys() -> Mapping[str, str]:
    return {name: new_key() for name in ("ada", "bob")}


@pytest.fixture(scope="module")
def server(
    keys: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TreeServer]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("".join(f"{name}:{hash_of(key)}\n" for name, key in keys.items()))
    with serving_tree(cpu, http_workers=2, api_keys=file, system_shared_memory=True) as running:
        yield running


def connect(server: TreeServer, way: str) -> Any:
    address = server.url.removeprefix("http://") if way == "http" else server.grpc
    return CLIENTS[way].InferenceServerClient(address)


def asked(module: ModuleType, name: str) -> dict[str, Any]:
    """A pooling of X from a region to the same one."""
    given = module.InferInput("input", X.shape, "FP32")
    given.set_shared_memory(name, X.nbytes)
    wanted = module.InferRequestedOutput("output")
    wanted.set_shared_memory(name, POOLED.nbytes, offset=X.nbytes)
    return {"inputs": [given], "outputs": [wanted], "parameters": {"kernel_size": 2}}


def answer(handle: Any) -> Any:
    """Return the contents of a region after X, and clear them."""
    data = handle._mpsm_handle.buf[X.nbytes : SIZE_BYTES]
    found = np.frombuffer(bytes(data), np.float32).reshape(POOLED.shape)
    data[:] = bytes(len(data))
    del data
    return found


def test_a_region_is_known_to_every_front_end_and_to_its_owner_alone(
    server: TreeServer, keys: Mapping[str, str]
) -> None:
    ada, bob = ({"authorization": f"Bearer {keys[name]}"} for name in ("ada", "bob"))
    with region(SIZE_BYTES) as (name, handle):
        shared_memory.set_shared_memory_region(handle, [X])
        with connect(server, "http") as client:
            client.register_system_shared_memory(name, f"/{name}", SIZE_BYTES, headers=ada)
        # Connections are dealt to the front ends in turn.
        for way in ("http", "http", "http", "grpc"):
            with connect(server, way) as client:
                kept = asked(CLIENTS[way], name)
                client.infer("maxpool2d_fwd", **kept, headers=ada)
                assert (answer(handle) == POOLED).all()
                with pytest.raises(InferenceServerException, match="there is no region"):
                    client.infer("maxpool2d_fwd", **kept, headers=bob)
                with pytest.raises(InferenceServerException, match="there is no region"):
                    client.get_system_shared_memory_status(name, headers=bob)
                client.unregister_system_shared_memory(headers=bob)  # all of his own
                client.unregister_system_shared_memory(name, headers=bob)
                assert not answer(handle).any()
        with connect(server, "grpc") as client:
            client.unregister_system_shared_memory(name, headers=ada)
        with (
            connect(server, "http") as client,
            pytest.raises(InferenceServerException, match="there is no region"),
        ):
            client.infer("maxpool2d_fwd", **asked(http_client, name), headers=ada)


def test_asyncio_clients_compute_in_shared_memory(
    server: TreeServer, keys: Mapping[str, str]
) -> None:
    key = {"authorization": f"Bearer {keys['ada']}"}

    async def ask() -> None:
        async with (
            http_aio.InferenceServerClient(server.url.removeprefix("http://")) as http,
            grpc_aio.InferenceServerClient(server.grpc) as grpc,
        ):
            for client, module in ((http, http_client), (grpc, grpc_client)):
                with region(SIZE_BYTES) as (name, handle):
                    shared_memory.set_shared_memory_region(handle, [X])
                    await client.register_system_shared_memory(
                        name, f"/{name}", SIZE_BYTES, headers=key
                    )
                    assert await client.get_system_shared_memory_status(name, headers=key)
                    await client.infer("maxpool2d_fwd", **asked(module, name), headers=key)
                    assert (answer(handle) == POOLED).all()
                    await client.unregister_system_shared_memory(name, headers=key)

    asyncio.run(ask())


def test_a_client_that_shortens_its_file_all_the_while_ends_no_process(
    server: TreeServer, keys: Mapping[str, str]
) -> None:
    key = {"authorization": f"Bearer {keys['ada']}"}
    before, deaths = server.children(), server.tree.hub.scheduler.deaths
    with region(SIZE_BYTES) as (name, _), region(SIZE_BYTES) as (other, steady):
        shared_memory.set_shared_memory_region(steady, [X])
        ended = threading.Event()

        def play() -> None:
            path = Path(SHM / name)
            while not ended.is_set():
                os.truncate(path, 4096)
                os.truncate(path, SIZE_BYTES)

        playing = threading.Thread(target=play)
        with connect(server, "http") as client:
            for each in (name, other):
                client.register_system_shared_memory(each, f"/{each}", SIZE_BYTES, headers=key)
            playing.start()
            try:
                for _ in range(100):
                    with suppress(InferenceServerException):
                        client.infer("maxpool2d_fwd", **asked(http_client, name), headers=key)
                    client.infer("maxpool2d_fwd", **asked(http_client, other), headers=key)
                    assert (answer(steady) == POOLED).all()
            finally:
                ended.set()
                playing.join()
    assert server.children() == before
    assert server.tree.hub.scheduler.deaths == deaths
