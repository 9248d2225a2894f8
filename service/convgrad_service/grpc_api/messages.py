"""The message classes of open_inference.proto, made from its compiled form.

They live in a descriptor pool of their own: a program that also imports another definition of the
protocol (tritonclient's, for one) would otherwise find every name taken.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

__all__ = ["POOL", "SERVICE", "message"]

_PACKAGE = "inference"

POOL = DescriptorPool()
"""Describes the protocol, for reflection too."""

for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("open_inference.binpb").read_bytes()
).file:
    POOL.Add(_file)
# Reflection describes these two services as well.
for _module in (health_pb2, reflection_pb2):
    _described = descriptor_pb2.FileDescriptorProto()
    _module.DESCRIPTOR.CopyToProto(_described)
    POOL.Add(_described)

SERVICE: ServiceDescriptor = POOL.FindServiceByName(f"{_PACKAGE}.GRPCInferenceService")
"""The service: its methods, and the messages that they take and give."""


def message(name: str) -> Any:
    """The class of the message ``name`` of the protocol, e.g. ``ModelReadyRequest``."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
