"""The message classes of the protocols that are spoken here, made from their compiled form.

They live in a descriptor pool of their own: a program that also imports another definition of one
of them (tritonclient's, for one) would otherwise find every name taken.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool

__all__ = ["HEALTH", "POOL", "REFLECTION", "REFLECTION_V1", "SERVICE", "message"]

POOL = DescriptorPool()
"""Describes the protocols, for reflection too."""

_REFLECTION = "grpc.reflection.v1alpha"
REFLECTION_V1 = "grpc.reflection.v1"
"""The later name of the same protocol."""


def _under_v1(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """Reflection's description under its later name."""
    later = descriptor_pb2.FileDescriptorProto()
    later.CopyFrom(file)
    later.name, later.package = f"v1/{file.name}", REFLECTION_V1
    for described in later.message_type:
        for field in described.field:
            if field.type_name:  # numbers and strings have none
                field.type_name = field.type_name.replace(_REFLECTION, REFLECTION_V1)
    for service in later.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_REFLECTION, REFLECTION_V1)
            method.output_type = method.output_type.replace(_REFLECTION, REFLECTION_V1)
    return later


for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("protocols.binpb").read_bytes()
).file:
    POOL.Add(_file)
    if _file.package == _REFLECTION:
        POOL.Add(_under_v1(_file))

SERVICE: ServiceDescriptor = POOL.FindServiceByName("inference.GRPCInferenceService")
"""The Open Inference Protocol: its methods, and the messages that they take and give."""
HEALTH: ServiceDescriptor = POOL.FindServiceByName("grpc.health.v1.Health")
"""gRPC's health checking."""
REFLECTION: ServiceDescriptor = POOL.FindServiceByName(f"{_REFLECTION}.ServerReflection")
"""gRPC's server reflection."""


def message(name: str, service: ServiceDescriptor = SERVICE) -> Any:
    """The class of a message of a service's package, e.g. ``ModelReadyRequest``."""
    full_name = f"{service.file.package}.{name}"
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full_name))
