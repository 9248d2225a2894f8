"""The message classes of the Open Inference Protocol, made from its compiled form.

They live in a descriptor pool of their own: a program that also imports another definition of the
protocol (tritonclient's, for one) would otherwise find every name taken.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from convgrad.errors import MalformedRequest

__all__ = ["POOL", "SERVICE", "message", "parsed"]

POOL = DescriptorPool()
"""Describes the protocol, for reflection too."""

for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("open_inference.binpb").read_bytes()
).file:
    POOL.Add(_file)

SERVICE: ServiceDescriptor = POOL.FindServiceByName("inference.GRPCInferenceService")
"""The Open Inference Protocol: its methods, and the messages that they take and give."""


def message(name: str) -> Any:
    """The class of a message of the protocol, e.g. ``ModelReadyRequest``."""
    full_name = f"{SERVICE.file.package}.{name}"
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(full_name))


def parsed(body: bytes, message_class: Any) -> Any:
    """A small message from its bytes.

    Raises
    ------
    MalformedRequest
        The bytes are no ``message_class``.
    """
    try:
        return message_class.FromString(body)
    except DecodeError:
        raise MalformedRequest(f"the message is no {message_class.DESCRIPTOR.name}") from None
