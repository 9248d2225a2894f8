"""Messages that are small: received whole and parsed."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from convgrad.errors import MalformedRequest
from convgrad_service.grpc_api.call import Call, Message

__all__ = ["parsed", "received"]


async def received(call: Call, request_type: Any) -> Any:
    """The one message of a call that takes a small one.

    Raises
    ------
    MalformedRequest
        There is none, or it is no ``request_type``.
    """
    incoming = await call.message()
    if incoming is None:
        raise MalformedRequest("the call ended without its message")
    return await parsed(incoming, request_type)


async def parsed(incoming: Message, request_type: Any) -> Any:
    """A small message, received whole; raises MalformedRequest if it is no ``request_type``."""
    try:
        return request_type.FromString(await incoming.whole())
    except DecodeError:
        raise MalformedRequest(f"the message is no {request_type.DESCRIPTOR.name}") from None
