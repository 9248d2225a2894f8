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

__all__ = ["HEALTH", "POOL", "REFLECTION", "SERVICE", "message"]

POOL = DescriptorPool()
"""Describes the protocols, for reflection too."""

for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("protocols.binpb").read_bytes()
).file:
    POOL.Add(_file)

SERVICE: ServiceDescriptor = POOL.FindServiceByName("inference.GRPCInferenceService")
"""The Open Inference Protocol: its methods, and the messages that they take and give."""
HEALTH: ServiceDescriptor = POOL.FindServiceByName("grpc.health.v1.Health")
"""gRPC's health checking."""
REFLECTION: ServiceDescriptor = POOL.FindServiceByName("grpc.reflection.v1alpha.ServerReflection")
"""gRPC's server reflection."""


def message(name: str, service: ServiceDescriptor = SERVICE) -> Any:
    """The class of a message of a service's package, e.g. ``ModelReadyRequest``."""
    full_name = f"{service.file.package}.{name}"
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full_name))
