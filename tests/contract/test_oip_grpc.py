"""The gRPC server's error paths: status and code of errors, deadlines, streams, limits,
health checking and reflection, through clients that others wrote."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client_module
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from convgrad.contract import OPERATIONS
from convgrad.errors import CODES, service_error
from tests.support.fake_backends import Blocking, Failing, Zeros
from tests.support.oip_server import OipServer, serving_oip
from tests.support.tree_server import until

MODEL = "conv_bwd_data"
IN_GRPC = [row for row in CODES.values() if row.grpc_status is not None]


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(Zeros(), grpc_max_message_bytes="1MiB", max_problem_bytes="1GiB") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: OipServer) -> Iterator[Any]:
    with client_module.InferenceServerClient(server.grpc) as connected:
        yield connected


@pytest.fixture(scope="module")
def stub(server: OipServer) -> Iterator[Any]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc, options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def inputs(grad_output: NDArray[Any] | None = None) -> list[Any]:
    arrays = {
        "grad_output": np.ones((1, 1, 2, 2), np.float32) if grad_output is None else grad_output,
        "weight": np.ones((1, 1, 2, 2), np.float32),
    }
    made = []
    for name, array in arrays.items():
        tensor = client_module.InferInput(name, array.shape, "FP32")
        made.append(tensor.set_data_from_numpy(array))
    return made


def request(grad_output_bytes: int = 16, **fields: Any) -> Any:
    made = service_pb2.ModelInferRequest(model_name=MODEL, **fields)
    made.inputs.add(name="grad_output", datatype="FP32", shape=[1, 1, 2, grad_output_bytes // 8])
    made.inputs.add(name="weight", datatype="FP32", shape=[1, 1, 2, 2])
    made.raw_input_contents.extend([bytes(grad_output_bytes), bytes(16)])
    return made


def failed(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Status, details and trailers of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata() or ())


def test_trailers_name_the_request(stub: Any) -> None:
    answer, call = stub.ModelInfer.with_call(request(), metadata=[("x-request-id", "mine")])
    assert answer.outputs[0].name == "grad_input"
    trailers = dict(call.trailing_metadata())
    assert trailers["x-request-id"] == "mine"
    assert "total;dur=" in trailers["server-timing"]
    assert "convgrad-code" not in trailers


def test_every_code_has_its_status() -> None:
    backend = Failing(ValueError())
    with serving_oip(backend) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for row in IN_GRPC:
            detail = f"what was found and expected, {row.code}"
            backend.error = service_error(row.code, detail, retry_after_s=2.5)
            status, details, trailers = failed(lambda: stub.ModelInfer(request()))
            assert status == grpc.StatusCode[row.grpc_status or ""]
            assert details == detail
            assert trailers["convgrad-code"] == row.code
            assert trailers["retry-after"] == "3"


def test_an_internal_error_tells_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving_oip(Failing(ZeroDivisionError("the secret"))) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        status, details, trailers = failed(lambda: stub.ModelInfer(request()))
        assert status == grpc.StatusCode.INTERNAL
        assert trailers["convgrad-code"] == "internal"
        assert trailers["x-request-id"] in details
        assert "secret" not in details
        assert "the secret" in caplog.text


def test_refusals(stub: Any) -> None:
    for spoil, code in (
        (lambda m: setattr(m, "model_name", "resnet"), "not-found"),
        (lambda m: setattr(m, "model_version", "2"), "not-found"),
        (lambda m: setattr(m.inputs[0], "name", "x"), "malformed-request"),
        (lambda m: setattr(m.parameters["strid"], "int64_param", 2), "malformed-request"),
        (lambda m: setattr(m.parameters["stride"], "int64_param", 0), "invalid-problem"),
        (lambda m: setattr(m.parameters["stride"], "int64_param", 10**5), "problem-too-large"),
        (
            lambda m: setattr(m.inputs[0].parameters["shared_memory_region"], "string_param", "r"),
            "malformed-request",
        ),
    ):
        made = request()
        spoil(made)
        status, details, trailers = failed(lambda made=made: stub.ModelInfer(made))
        assert trailers["convgrad-code"] == code, details
        assert status == grpc.StatusCode[CODES[code].grpc_status or ""]


def test_bytes_that_are_no_message(server: OipServer) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        for method in ("ModelInfer", "ModelReady"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            status, _, trailers = failed(lambda call=call: call(b"\x0a\x05ab"))
            assert status == grpc.StatusCode.INVALID_ARGUMENT
            assert trailers["convgrad-code"] == "malformed-request"
        call = channel.unary_unary("/inference.GRPCInferenceService/TraceSetting")
        assert failed(lambda: call(b""))[0] == grpc.StatusCode.UNIMPLEMENTED


def test_messages_over_the_limit(stub: Any) -> None:
    assert stub.ModelInfer(request(2**19)).outputs
    # grpcio refuses it by itself, from its length, before it has come.
    for size_bytes in (2**20, 2**26):
        status, details, _ = failed(lambda size=size_bytes: stub.ModelInfer(request(size)))
        assert status == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in details
        assert "1048576" in details


def test_answers_over_what_a_message_holds() -> None:
    sizes = {"max_problem_bytes": "8GiB", "max_inflight_bytes": "8GiB"}
    with (
        serving_oip(Zeros(), **{**sizes, "max_output_ratio": 1e9}) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        made = request()
        made.parameters["stride"].string_param = "[30000, 20000]"
        status, details, _ = failed(lambda: stub.ModelInfer(made))
        assert status == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "a gRPC message holds at most 2,147,483,647; use HTTP or shared memory" in details


def test_deadlines_and_cancellation_free_the_work() -> None:
    backend = Blocking()
    with (
        serving_oip(backend, compute_slots=1) as server,
        grpc.insecure_channel(server.grpc) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # A deadline so short may pass before the work begins, where much else is to be done.
        for deadline_s in (0.6, 6, 60):
            status, _, _ = failed(lambda s=deadline_s: stub.ModelInfer(request(), timeout=s))
            assert status == grpc.StatusCode.DEADLINE_EXCEEDED
            if backend.runs >= 1:
                break
        made = request()
        for deadline_s in (0.6, 6, 60):
            made.parameters["timeout"].int64_param = int(1e6 * deadline_s)
            status, details, trailers = failed(lambda: stub.ModelInfer(made))
            assert status == grpc.StatusCode.DEADLINE_EXCEEDED
            assert f"{deadline_s} s" in details
            assert trailers["convgrad-code"] == "deadline-exceeded"
            if backend.runs >= 2:
                break
        until(lambda: backend.cancelled == backend.runs >= 2)
        before = backend.runs
        call = stub.ModelInfer.future(request())
        until(lambda: backend.runs == before + 1)
        call.cancel()
        until(lambda: backend.cancelled == before + 1)
        until(lambda: not held(server))


def held(server: OipServer) -> int:
    hub: Any = server.pipeline.engine
    return int(hub.memory.used_bytes)


def streamed(client: Any) -> queue.Queue[Any]:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    return answers


def test_streams_answer_in_order_and_survive_errors(server: OipServer) -> None:
    with client_module.InferenceServerClient(server.grpc) as client:
        answers = streamed(client)
        for index in range(20):
            model = "resnet" if index % 5 == 4 else MODEL
            parameters = {"stride": 0} if index % 5 == 3 else {}
            # Large ones are received to their places, small ones whole.
            height = 2 + 200 * (index % 2)
            wide = np.zeros((1, 1, height, 300 + index), np.float32)
            client.async_stream_infer(
                model,
                inputs(wide),
                request_id=str(index),
                parameters=parameters,
                enable_empty_final_response=True,
            )
        for index in range(20):
            answer = answers.get(timeout=60)
            if index % 5 >= 3:
                assert isinstance(answer, InferenceServerException)
                code = "not-found" if index % 5 == 4 else "invalid-problem"
                assert f"({code})" in answer.message()
            else:
                response = answer.get_response()
                assert response.id == str(index)
                height = 3 + 200 * (index % 2)
                assert list(response.outputs[0].shape) == [1, 1, height, 301 + index]
                assert response.parameters["triton_final_response"].bool_param
        client.stop_stream()


def test_a_cancelled_stream_frees_the_work() -> None:
    backend = Blocking()
    with (
        serving_oip(backend, compute_slots=1) as server,
        client_module.InferenceServerClient(server.grpc) as client,
    ):
        streamed(client)
        for _ in range(3):
            client.async_stream_infer(MODEL, inputs())
        assert backend.started.acquire(timeout=60)
        client.stop_stream(cancel_requests=True)
        assert backend.ended.acquire(timeout=60)
        assert backend.cancelled == 1
        until(lambda: not held(server))


def test_descriptions(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready(MODEL, "2")
    assert not client.is_model_ready("resnet")
    metadata = client.get_server_metadata()
    assert metadata.name == "convgrad"
    assert "binary_tensor_data" in metadata.extensions
    for name, operation in OPERATIONS.items():
        model = client.get_model_metadata(name)
        assert {tensor.name for tensor in model.inputs} == set(operation.tensors)
        assert tuple(tensor.name for tensor in model.outputs) == operation.outputs
        assert all(set(tensor.shape) == {-1} for tensor in (*model.inputs, *model.outputs))
        config = client.get_model_config(name, "1").config
        assert [tensor.name for tensor in config.input] == [tensor.name for tensor in model.inputs]
        required = tuple(tensor.name for tensor in config.input if not tensor.optional)
        assert required == operation.required_tensors
        assert config.input[0].data_type == 11  # FP32
        assert config.max_batch_size == 0
    assert [model.name for model in client.get_model_repository_index().models] == list(OPERATIONS)
    with pytest.raises(InferenceServerException, match="no model"):
        client.get_model_metadata("resnet")


def test_statistics(client: Any) -> None:
    def successes() -> int:
        (model,) = client.get_inference_statistics(MODEL).model_stats
        return int(model.inference_stats.success.count)

    # What an answer adds is there a moment after it.
    until(lambda: successes() == (time.sleep(0.1), successes())[1])
    before = successes()
    client.infer(MODEL, inputs())
    until(lambda: successes() == before + 1)
    assert len(client.get_inference_statistics().model_stats) == len(OPERATIONS)


def test_what_this_server_does_not_do(client: Any) -> None:
    for call in (
        lambda: client.register_system_shared_memory("r", "/r", 64),
        lambda: client.unregister_system_shared_memory(),
        lambda: client.get_system_shared_memory_status(),
        lambda: client.register_cuda_shared_memory("r", b"AAAA", 0, 64),
        lambda: client.unregister_cuda_shared_memory(),
        lambda: client.get_cuda_shared_memory_status(),
        lambda: client.load_model(MODEL),
        lambda: client.unload_model(MODEL),
    ):
        with pytest.raises(
            InferenceServerException, match=r"not enabled|cannot be loaded"
        ) as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_health_checking(server: OipServer) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        unknown = health_pb2.HealthCheckRequest(service="x")
        assert failed(lambda: stub.Check(unknown))[0] == grpc.StatusCode.NOT_FOUND


def test_health_follows_readiness() -> None:
    backend = Zeros()
    with serving_oip(backend) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        seen: queue.Queue[int] = queue.Queue()
        watching = stub.Watch(health_pb2.HealthCheckRequest())

        def watch() -> None:
            try:
                for answer in watching:
                    seen.put(answer.status)
            except grpc.RpcError:
                pass  # cancelled below

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            assert seen.get(timeout=60) == health_pb2.HealthCheckResponse.SERVING
            backend.fault = "an illegal address"
            assert seen.get(timeout=60) == health_pb2.HealthCheckResponse.NOT_SERVING
            inference = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert not inference.ServerReady(service_pb2.ServerReadyRequest()).ready
            status, _, trailers = failed(lambda: inference.ModelInfer(request()))
            assert status == grpc.StatusCode.UNAVAILABLE
            assert trailers["convgrad-code"] == "device-unavailable"
        finally:
            watching.cancel()
            thread.join(5)


def test_reflection(server: OipServer) -> None:
    """Asks as grpcurl does: for the services, and for the file that describes one."""
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="inference.GRPCInferenceService"
        ),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
    ]
    with grpc.insecure_channel(server.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, inference, health = stub.ServerReflectionInfo(iter(asked))
    services = [service.name for service in listed.list_services_response.service]
    assert services == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]
    for answer, service in ((inference, "GRPCInferenceService"), (health, "Health")):
        (described,) = answer.file_descriptor_response.file_descriptor_proto
        file = descriptor_pb2.FileDescriptorProto.FromString(described)
        assert service in [item.name for item in file.service]
