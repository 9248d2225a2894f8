"""CUDA shared memory as in Triton's extension, on a fake GPU: see `tests.support.fake_gpu`."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from convgrad.errors import InvalidProblem, MalformedRequest, NotFound
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.engine.scheduling.job import Job
from convgrad_service.engine.shm.registry import RegionInfo, RegionPart, RegionRegistry, RegionSlice
from convgrad_service.problems import Problem
from tests.support.fake_gpu import SHM, FakeGpu, allocated, fake_gpu, handle_of, one_of_two
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import serving_tree

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not SHM.is_dir(), reason="needs /dev/shm")]
CLIENTS: dict[str, Any] = {"http": http_client, "grpc": grpc_client}
GRAD = np.random.default_rng(0).standard_normal((4, 4, 6, 6), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 2, 3, 3), np.float32)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def server(gpu: FakeGpu) -> Iterator[OipServer]:
    with serving_oip(gpu, cuda_shared_memory=True) as live:
        yield live


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> Any:
    return CLIENTS[request.param]


def connected(module: Any, server: Any) -> Any:
    return module.InferenceServerClient(getattr(server, module.__name__.rpartition(".")[2]))


def problem() -> Problem:
    from convgrad.contract import OPERATIONS, validate
    from convgrad_service.problems import problem_from

    given = {"grad_output": GRAD, "weight": WEIGHT}
    return problem_from("conv_bwd_data", validate(OPERATIONS["conv_bwd_data"].request, given))


def expected() -> NDArray[Any]:
    tensors = {"grad_output": GRAD, "weight": WEIGHT}
    return CpuBackend(threads=1).run(problem(), tensors).outputs["grad_input"]


def infer(module: Any, client: Any, device: NDArray[np.uint8]) -> NDArray[Any]:
    """conv_bwd_data with everything in one region: inputs, then the output."""
    return inferred(module, client, device)[0]


def inferred(
    module: Any, client: Any, device: NDArray[np.uint8], name: str = "gpu"
) -> tuple[NDArray[Any], str]:
    """The same, and the kernel that the answer names."""
    at, given = 0, []
    for tensor, array in (("grad_output", GRAD), ("weight", WEIGHT)):
        device[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        given.append(module.InferInput(tensor, array.shape, "FP32"))
        given[-1].set_shared_memory(name, array.nbytes, at)
        at += array.nbytes
    wanted = module.InferRequestedOutput("grad_input")
    spec = problem().outputs["grad_input"]
    wanted.set_shared_memory(name, spec.size_bytes, at)
    response = client.infer("conv_bwd_data", given, outputs=[wanted]).get_response()
    kernel = (
        response["parameters"]["kernel"]
        if module is http_client
        else response.parameters["kernel"].string_param
    )
    found = device[at : at + spec.size_bytes].view(np.float32).reshape(spec.shape)
    return found, kernel


def test_tensors_on_the_device_never_pass_the_host(
    module: Any, server: OipServer, gpu: FakeGpu
) -> None:
    with allocated(64 * 1024) as (handle, device), connected(module, server) as client:
        client.register_cuda_shared_memory("gpu", _raw(handle), 0, device.size)
        assert (infer(module, client, device) == expected()).all()
        assert gpu.moved_bytes == 0
        client.unregister_cuda_shared_memory("gpu")
        with pytest.raises(InferenceServerException, match="no region"):
            infer(module, client, device)


def test_a_problem_in_parts_is_cut_on_the_device(
    server: OipServer, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 1000)
    tensor_layout_of.cache_clear()
    try:
        with allocated(64 * 1024) as (handle, device), connected(http_client, server) as client:
            client.register_cuda_shared_memory("gpu", _raw(handle), 0, device.size)
            assert (infer(http_client, client, device) == expected()).all()
            assert gpu.moved_bytes == 0
    finally:
        tensor_layout_of.cache_clear()


def test_what_was_registered_is_told(module: Any, server: OipServer) -> None:
    with allocated(4096) as (handle, _), connected(module, server) as client:
        client.register_cuda_shared_memory("a", _raw(handle), 0, 4096)
        client.register_cuda_shared_memory("b", _raw(handle), 0, 100)
        status = client.get_cuda_shared_memory_status()
        if module is http_client:
            found = {each["name"]: (each["device_id"], each["byte_size"]) for each in status}
        else:
            found = {key: (each.device_id, each.byte_size) for key, each in status.regions.items()}
        assert found == {"a": (0, 4096), "b": (0, 100)}
        client.unregister_cuda_shared_memory()
        status = client.get_cuda_shared_memory_status()
        assert not (status if module is http_client else status.regions)
    extensions = httpx.get(f"http://{server.http}/v2", timeout=60).json()["extensions"]
    assert "cuda_shared_memory" in extensions
    assert "system_shared_memory" not in extensions


def test_what_cannot_be_is_refused(module: Any, server: OipServer) -> None:
    def refused(sentence: str, *arguments: Any) -> None:
        with pytest.raises(InferenceServerException, match=sentence):
            client.register_cuda_shared_memory(*arguments)

    with allocated(4096) as (handle, _), connected(module, server) as client:
        raw = _raw(handle)
        refused("has 4,096 bytes; a region of 4,097", "gpu", raw, 0, 4097)
        refused("cannot be opened", "gpu", _raw(handle_of("nothing")), 0, 1)
        refused("device_id is 3; the devices that work here are 0", "gpu", raw, 3, 4096)
        client.register_cuda_shared_memory("gpu", raw, 0, 4096)
        refused("registered already", "gpu", raw, 0, 4096)


def test_each_kind_has_its_switch(module: Any, gpu: FakeGpu) -> None:
    with (
        serving_oip(gpu, system_shared_memory=True) as server,
        connected(module, server) as client,
    ):
        client.unregister_cuda_shared_memory()  # as clients do before they register anything
        with pytest.raises(InferenceServerException, match="CUDA shared memory is not enabled"):
            client.register_cuda_shared_memory("gpu", _raw(handle_of("x")), 0, 1)
    with (
        serving_oip(gpu, cuda_shared_memory=True) as server,
        connected(module, server) as client,
    ):
        client.unregister_system_shared_memory()
        with pytest.raises(InferenceServerException, match="system shared memory is not"):
            client.register_system_shared_memory("shm", "/shm", 64)


def test_a_server_without_a_gpu_says_so() -> None:
    with serving_oip(CpuBackend(), cuda_shared_memory=True) as server:
        client = connected(http_client, server)
        with pytest.raises(InferenceServerException, match="computes on the CPU"):
            client.register_cuda_shared_memory("gpu", _raw(handle_of("x")), 0, 1)
        client.close()


def test_indices_are_read_once(server: OipServer, gpu: FakeGpu) -> None:
    """They say where to write, so they are copied before they are validated."""
    indices = np.arange(4, dtype=np.int64).reshape(1, 1, 2, 2) * 5
    with allocated(4096) as (handle, device), connected(http_client, server) as client:
        device[: indices.nbytes] = indices.reshape(-1).view(np.uint8)
        client.register_cuda_shared_memory("gpu", _raw(handle), 0, 4096)
        given = [
            http_client.InferInput("grad_output", indices.shape, "FP32"),
            http_client.InferInput("indices", indices.shape, "INT64"),
        ]
        given[0].set_data_from_numpy(np.ones(indices.shape, np.float32))
        given[1].set_shared_memory("gpu", indices.nbytes)
        parameters = {"kernel_size": 2, "input_size": "[4, 4]"}
        device[: indices.nbytes].view(np.int64)[:] = [0, 2, 8, 10]
        found = client.infer("maxpool2d_bwd", given, parameters=parameters)
        wanted = np.zeros(16, np.float32)
        wanted[[0, 2, 8, 10]] = 1
        assert (found.as_numpy("grad_input").reshape(-1) == wanted).all()
        assert gpu.moved_bytes >= indices.nbytes


def test_an_output_where_an_input_lies_is_refused(server: OipServer) -> None:
    with allocated(4096) as (handle, _), connected(http_client, server) as client:
        client.register_cuda_shared_memory("gpu", _raw(handle), 0, 4096)
        given = [
            http_client.InferInput(name, (1, 1, 1, 1), "FP32") for name in ("grad_output", "weight")
        ]
        given[0].set_shared_memory("gpu", 4, 0)
        given[1].set_shared_memory("gpu", 4, 4)
        wanted = http_client.InferRequestedOutput("grad_input")
        wanted.set_shared_memory("gpu", 4, 4)
        with pytest.raises(InferenceServerException, match="overlaps another tensor"):
            client.infer("conv_bwd_data", given, outputs=[wanted])


def test_a_worker_that_dies_is_followed_by_one_that_opens_them_again(module: Any) -> None:
    with (
        serving_tree(fake_gpu, cuda_shared_memory=True, http_workers=2) as server,
        allocated(64 * 1024) as (handle, device),
        module.InferenceServerClient(
            server.url.removeprefix("http://") if module is http_client else server.grpc
        ) as client,
    ):
        client.register_cuda_shared_memory("gpu", _raw(handle), 0, device.size)
        for _ in range(2):
            assert (infer(module, client, device) == expected()).all()
            server.kill_worker()
        client.unregister_cuda_shared_memory()


def test_a_problem_goes_where_its_tensors_are() -> None:
    with (
        serving_tree(one_of_two, slots=1, cuda_shared_memory=True) as server,
        allocated(64 * 1024) as (handle, device),
        http_client.InferenceServerClient(server.url.removeprefix("http://")) as client,
    ):
        client.register_cuda_shared_memory("gpu", _raw(handle), 1, device.size)
        for _ in range(3):
            found, kernel = inferred(http_client, client, device)
            assert (found == expected()).all()
            assert kernel == "device 1"


def test_tensors_on_two_devices_are_no_request() -> None:
    layout = tensor_layout_of(problem(), ("grad_output", "weight"))
    places = RegionSlice(1, 0, (-1, 7), 0), RegionSlice(2, 0, (-2, 8), 1)
    with pytest.raises(InvalidProblem, match="devices 0 and 1; expected one"):
        _ = Job(layout, 0, places).device


def test_a_region_is_its_owners_alone() -> None:
    async def scenario() -> None:
        regions = RegionRegistry(8)
        info = RegionInfo("gpu", "", 0, 64, handle_of("x"), 0)
        regions.register("ada", info)
        regions.register("bob", info)
        with pytest.raises(MalformedRequest, match="registered already"):
            regions.register("ada", info)
        assert regions.list_regions("ada", "", on_device=True) == [info]
        assert regions.list_regions("ada", "") == []
        await regions.unregister("ada", "")  # of the other kind
        (place,) = regions.acquire([RegionPart("ada", "gpu", 32, 32)])
        assert (place.offset, place.device) == (32, 0)
        with pytest.raises(InvalidProblem, match="which has 64"):
            regions.acquire([RegionPart("ada", "gpu", 33, 32)])
        leaving = asyncio.ensure_future(regions.unregister("ada", "", on_device=True))
        await asyncio.sleep(0)
        assert not leaving.done()  # it is in use
        with pytest.raises(NotFound):
            regions.acquire([RegionPart("ada", "gpu", 0, 1)])
        regions.release([place])
        await leaving
        assert regions.list_regions("bob", "gpu", on_device=True) == [info]

    asyncio.run(scenario())


def _raw(handle: bytes) -> bytes:
    """A handle as tritonclient's own helper makes it."""
    return base64.b64encode(handle)
