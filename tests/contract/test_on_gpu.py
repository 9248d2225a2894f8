"""The whole server on a real GPU: others' memory there, stored tensors kept there, and parts."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

import convgrad
from convgrad.dtypes import DType
from convgrad_service.backends.cuda.backend import CudaBackend
from tests.support.tree_server import TreeServer, serving_tree

pytestmark = pytest.mark.gpu
MiB = 2**20


def cuda(device: int) -> CudaBackend:
    """For a worker's process."""
    return CudaBackend(device)


@pytest.fixture(scope="module")
def server() -> Iterator[TreeServer]:
    with serving_tree(cuda, slots=4, cuda_shared_memory=True, system_shared_memory=True) as serving:
        yield serving


@pytest.fixture
def client(server: TreeServer) -> Iterator[convgrad.Client]:
    with convgrad.Client(server.url, max_retries=0) as made:
        yield made


def drawn(shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    found = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return found.astype(DType.BFLOAT16.numpy)


class Device:
    """Allocations of this process on the GPU, registered with a server: inputs, and the output."""

    def __init__(self, client: Any, inputs: dict[str, NDArray[Any]], output_bytes: int) -> None:
        from tritonclient.utils import cuda_shared_memory

        self.module, self.client = cuda_shared_memory, client
        in_bytes = sum(array.nbytes for array in inputs.values())
        self.source = self._made("in", in_bytes)
        self.target = self._made("out", output_bytes)
        arrays = [array.view(np.uint16) for array in inputs.values()]
        self.module.set_shared_memory_region(self.source, arrays)
        self.given, at = [], 0
        for name, array in inputs.items():
            self.given.append(triton.InferInput(name, array.shape, "BF16"))
            self.given[-1].set_shared_memory("in", array.nbytes, at)
            at += array.nbytes

    def _made(self, name: str, size_bytes: int) -> Any:
        region = self.module.create_shared_memory_region(name, size_bytes, 0)
        handle = self.module.get_raw_handle(region)
        self.client.register_cuda_shared_memory(name, handle, 0, size_bytes)
        return region

    def read(self, at: int, like: NDArray[Any]) -> NDArray[Any]:
        everything = self.module.get_contents_as_numpy(
            self.target, np.uint16, [(at + like.nbytes) // 2]
        )
        return everything[at // 2 :].reshape(like.shape)

    def close(self) -> None:
        self.client.unregister_cuda_shared_memory()
        self.module.destroy_shared_memory_region(self.source)
        self.module.destroy_shared_memory_region(self.target)


def tritonclient_of(server: TreeServer) -> Any:
    return triton.InferenceServerClient(server.url.removeprefix("http://"))


@pytest.mark.parametrize(("batch", "at"), [(1, 0), (3, 2), (64, 0), (64, 2)])
def test_tensors_of_another_process_are_computed_where_they_lie(
    server: TreeServer, client: convgrad.Client, batch: int, at: int
) -> None:
    """A batch of 64 is computed in parts; two bytes further no kernel can write."""
    grad, weight = drawn((batch, 127, 63, 63), 0), drawn((127, 65, 3, 3), 1)
    wanted = client.conv_bwd_data(grad, weight, padding=1)
    with tritonclient_of(server) as other:
        device = Device(other, {"grad_output": grad, "weight": weight}, at + wanted.nbytes)
        output = triton.InferRequestedOutput("grad_input")
        output.set_shared_memory("out", wanted.nbytes, at)

        def infer() -> NDArray[Any]:
            other.infer("conv_bwd_data", device.given, outputs=[output], parameters={"padding": 1})
            return device.read(at, wanted)

        assert (infer() == wanted.view(np.uint16)).all()
        assert (infer() == wanted.view(np.uint16)).all()
        server.kill_worker()  # the next one opens the handles again
        assert (infer() == wanted.view(np.uint16)).all()
        device.close()


def test_a_region_beyond_its_allocation_is_refused(server: TreeServer) -> None:
    with tritonclient_of(server) as other:
        device = Device(other, {"grad_output": drawn((1, 1, 1024, 1024), 0)}, MiB)
        handle = device.module.get_raw_handle(device.source)
        with pytest.raises(InferenceServerException, match="a region of 67,108,864 is not in it"):
            other.register_cuda_shared_memory("more", handle, 0, 64 * MiB)
        with pytest.raises(InferenceServerException, match="device_id is 9"):
            other.register_cuda_shared_memory("more", handle, 9, MiB)
        with pytest.raises(InferenceServerException, match="raw handle"):
            other.register_cuda_shared_memory("wrong", base64.b64encode(bytes(64)), 0, MiB)
        device.close()


def test_who_frees_what_is_registered_harms_nobody_else(
    server: TreeServer, client: convgrad.Client
) -> None:
    grad, weight = drawn((4, 64, 64, 64), 0), drawn((64, 64, 3, 3), 1)
    wanted = client.conv_bwd_data(grad, weight, padding=1)
    with tritonclient_of(server) as other:
        device = Device(other, {"grad_output": grad, "weight": weight}, wanted.nbytes)
        output = triton.InferRequestedOutput("grad_input")
        output.set_shared_memory("out", wanted.nbytes)
        ask = {"parameters": {"padding": 1}, "outputs": [output]}
        other.infer("conv_bwd_data", device.given, **ask)
        for kind in ("source", "target"):
            device.module.destroy_shared_memory_region(getattr(device, kind))
            delattr(device, kind)  # the last to hold it: it is freed
        # What it computes from memory that is gone is its own business.
        with contextlib.suppress(InferenceServerException):
            other.infer("conv_bwd_data", device.given, **ask)
        found = client.conv_bwd_data(grad, weight, padding=1)
        assert (found.view(np.uint16) == wanted.view(np.uint16)).all()
        other.unregister_cuda_shared_memory()
    found = client.conv_bwd_data(grad, weight, padding=1)
    assert (found.view(np.uint16) == wanted.view(np.uint16)).all()


def test_a_stored_tensor_is_uploaded_once(client: convgrad.Client) -> None:
    grad, weight = drawn((96, 64, 64, 64), 0), drawn((64, 64, 3, 3), 1)
    sending = convgrad.calls.conv_bwd_data(grad, weight, padding=1)
    wanted = client.call(sending).outputs
    kept = client.put("grad", grad), client.put("weight", weight)
    call = convgrad.calls.conv_bwd_data(*kept, padding=1)
    sent_s = [client.call(sending).server_timing_s["upload"] for _ in range(4)]
    stored_s = []
    for _ in range(4):
        answer = client.call(call)
        assert (answer.outputs.view(np.uint16) == wanted.view(np.uint16)).all()
        stored_s.append(answer.server_timing_s["upload"])
    print(f"uploads of {grad.nbytes:,} bytes, sent: {sent_s} s, stored: {stored_s} s")
    assert min(stored_s) < min(sent_s) / 2
    # A new tensor of the same name is another one.
    client.put("grad", grad * DType.BFLOAT16.numpy.type(2))
    doubled = client.call(call).outputs
    assert (doubled.astype(np.float32) == 2 * wanted.astype(np.float32)).all()
    for name in ("grad", "weight"):
        client.drop(name)


def test_a_result_that_is_kept_is_never_uploaded(client: convgrad.Client) -> None:
    # Large, so that its copy takes several times what the stage takes besides; what is larger yet
    # is sent in pieces, whose uploads nobody is told of.
    grad, weight = drawn((96, 64, 64, 64), 0), client.put("weight", drawn((64, 64, 3, 3), 1))
    client.conv_bwd_data(grad, weight, padding=1)
    keeping = client.with_options(store={"grad_input": "g"})
    keeping.conv_bwd_data(grad, weight, padding=1)
    sent = client.fetch("g")
    wanted = client.call(convgrad.calls.conv_fwd(sent, weight, padding=1))
    kept_s = []
    for _ in range(4):
        kept = keeping.conv_bwd_data(grad, weight, padding=1)
        answer = client.call(convgrad.calls.conv_fwd(kept, weight, padding=1))
        assert (answer.outputs.view(np.uint16) == wanted.outputs.view(np.uint16)).all()
        kept_s.append(answer.server_timing_s["upload"])
    print(
        f"uploads of {sent.nbytes:,} bytes: {wanted.server_timing_s['upload']} s, kept {kept_s} s"
    )
    assert min(kept_s) < wanted.server_timing_s["upload"] / 2
    for name in ("g", "weight"):
        client.drop(name)


def test_a_sum_in_parts_is_the_sum(client: convgrad.Client) -> None:
    draw = np.random.default_rng(0)
    images, grad = (
        draw.integers(-2, 3, (256, 64, 64, 64), np.int8).astype(DType.BFLOAT16.numpy)
        for _ in range(2)
    )
    made = {"weight_size": (3, 3), "padding": 1}
    call = convgrad.calls.grouped_conv_bwd_weight
    in_parts = client.call(call(images, grad, **made))
    assert in_parts.report.pieces == 2
    # The number of splits is kept to where it is stated: this one is computed whole.
    whole = client.call(call(images, grad, split_k=1, **made))
    assert whole.report.pieces == 1
    # Every sum is exact in float32, so that both are rounded from the same.
    found, wanted = (each.outputs.grad_weight.view(np.uint16) for each in (in_parts, whole))
    assert (found == wanted).all()


def test_parts_come_before_all_is_computed(client: convgrad.Client) -> None:
    grad, weight = drawn((256, 64, 64, 64), 0), drawn((64, 64, 3, 3), 1)
    wanted = client.conv_bwd_data(grad, weight, padding=1)
    call = convgrad.calls.conv_bwd_data(grad, weight, padding=1)
    rows = list(client.iterate(call))
    assert len(rows) > 1
    assert (rows[-1].whole.view(np.uint16) == wanted.view(np.uint16)).all()
