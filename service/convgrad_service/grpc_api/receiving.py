"""Messages that are small: received whole and parsed."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from convgrad.errors import MalformedRequest
from convgrad_service.grpc_api.call import Call

__all__ = ["received"]


async def received(call: Call, request_type: Any) -> Any:
    """The next message of a call that takes small ones.

    Raises
    ------
    MalformedRequest
        There is none, or it is no ``request_type``.
    """
    incoming = await call.message()
    if incoming is None:
        raise MalformedRequest("the call ended without its message")
    try:
        return request_type.FromString(await incoming.whole())
    except DecodeError:
        raise MalformedRequest(f"the message is no {request_type.DESCRIPTOR.name}") from None
