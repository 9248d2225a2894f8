"""The message classes of the Open Inference Protocol, made from its compiled descriptors.

They have their own descriptor pool: in protobuf's default pool their names would collide with those
of any other copy of the protocol in the process, such as tritonclient's.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from convgrad.errors import MalformedRequest
from convgrad_service.grpc_api.compression import inflated, is_compressed

__all__ = ["POOL", "SERVICE", "message", "parsed"]

POOL = DescriptorPool()
"""The protocol's descriptors."""

# Of messages without tensors, which have a few bytes.
_MAX_INFLATED_BYTES = 64 * 1024

for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("open_inference.binpb").read_bytes()
).file:
    POOL.Add(_file)

SERVICE: ServiceDescriptor = POOL.FindServiceByName("inference.GRPCInferenceService")
"""The protocol's service."""


def message(name: str) -> Any:
    """Return the class of a message, e.g. ``ModelReadyRequest``."""
    full_name = f"{SERVICE.file.package}.{name}"
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full_name))


def parsed(body: bytes, message_class: Any) -> Any:
    """Parse a message without tensors, which may be compressed.

    Raises as `inflated`, and MalformedRequest if it cannot be parsed.
    """
    if is_compressed(body):
        body = inflated(body, _MAX_INFLATED_BYTES)
    try:
        return message_class.FromString(body)
    except DecodeError:
        raise MalformedRequest(f"the message is not a {message_class.DESCRIPTOR.name}") from None
