"""Clients such as grpcurl learn the services from the server alone, and call one."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from convgrad_service.backends.cpu import CpuBackend
from tests.support.oip_server import serving_oip


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with (
        serving_oip(CpuBackend(threads=1)) as server,
        grpc.insecure_channel(server.grpc) as opened,
    ):
        yield opened


def test_a_client_that_knows_nothing_calls_a_method(channel: grpc.Channel) -> None:
    known = ProtoReflectionDescriptorDatabase(channel)
    pool = DescriptorPool(known)
    names = list(known.get_services())
    assert "inference.GRPCInferenceService" in names
    for name in names:
        assert pool.FindServiceByName(name).methods
    method = pool.FindMethodByName("inference.GRPCInferenceService.ModelInfer")
    request_class, response_class = (
        message_factory.GetMessageClass(each) for each in (method.input_type, method.output_type)
    )
    image = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    request = request_class(model_name="maxpool2d_fwd", raw_input_contents=[image.tobytes()])
    request.inputs.add(name="input", datatype="FP32", shape=image.shape)
    request.parameters["kernel_size"].int64_param = 2
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )
    answer = call(request)
    found = np.frombuffer(answer.raw_output_contents[0], np.float32)
    assert found.tolist() == [5, 7, 13, 15]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_every_symbol_is_described(channel: grpc.Channel, version: str) -> None:
    """A description of all that there is asks for the services, their methods and messages."""
    ask = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    def described(symbol: str) -> descriptor_pb2.FileDescriptorProto:
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol)
        (answer,) = ask(iter([asked]))
        assert not answer.HasField("error_response"), symbol
        (file,) = answer.file_descriptor_response.file_descriptor_proto
        return descriptor_pb2.FileDescriptorProto.FromString(file)

    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    (listed,) = ask(iter([listing]))
    names = [each.name for each in listed.list_services_response.service]
    assert f"grpc.reflection.{version}.ServerReflection" in names
    for name in names:
        file = described(name)
        (service,) = (each for each in file.service if f"{file.package}.{each.name}" == name)
        for method in service.method:
            assert described(f"{name}.{method.name}") == file
            for kind in (method.input_type, method.output_type):
                assert described(kind.removeprefix(".")) == file
    nothing = reflection_pb2.ServerReflectionRequest(file_containing_symbol="there.is.Nothing")
    (answer,) = ask(iter([nothing]))
    assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
