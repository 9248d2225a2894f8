"""Requests that store, download, delete and list tensors on the server."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from convgrad._body import WIRES, Body, writable
from convgrad._call import Stored, as_tensor
from convgrad._exchange import Target
from convgrad._reply import Reply, read_json
from convgrad.errors import InvalidAnswer, MalformedRequest
from convgrad.wire import safetensors

__all__ = ["drop_target", "fetch_target", "list_target", "put_target"]


def put_target(name: str, tensor: Any, time_to_live_s: float | None) -> Target[Stored]:
    """Make the request that stores a tensor."""
    array = as_tensor("tensor", tensor)
    if time_to_live_s is not None and not time_to_live_s > 0:
        raise MalformedRequest(f"time_to_live_s: expected seconds above zero, got {time_to_live_s}")
    lives = {} if time_to_live_s is None else {"x-time-to-live": f"{time_to_live_s:g}"}
    body = Body(WIRES["safetensors"].media_type, safetensors.encode({"tensor": array}, {}))

    def read(reply: Reply, attempts: int) -> Stored:
        return _read_description(read_json(reply), name)

    return Target("PUT", _path(name), body, read, lives)


def fetch_target(name: str) -> Target[NDArray[Any]]:
    """Make the request that downloads a stored tensor."""

    def read(reply: Reply, attempts: int) -> NDArray[Any]:
        try:
            tensors, _ = safetensors.decode(reply.content.data)
            (array,) = tensors.values()
        except (ValueError, MalformedRequest) as refused:
            raise InvalidAnswer(f"the answer cannot be read: {refused}") from refused
        return writable(array)

    return Target("GET", _path(name), None, read, {"accept": WIRES["safetensors"].media_type})


def drop_target(name: str) -> Target[None]:
    """Make the request that deletes a stored tensor."""
    return Target("DELETE", _path(name), None, lambda reply, attempts: None)


def list_target() -> Target[Mapping[str, Stored]]:
    """Make the request that lists the stored tensors by name."""

    def read(reply: Reply, attempts: int) -> Mapping[str, Stored]:
        found = read_json(reply)
        try:
            described = {str(each["name"]): each for each in found["tensors"]}
        except (TypeError, KeyError) as refused:
            raise InvalidAnswer('expected {"tensors": [{"name": …}, …]}') from refused
        return MappingProxyType(
            {name: _read_description(each, name) for name, each in described.items()}
        )

    return Target("GET", "tensors", None, read)


def _read_description(description: Any, name: str) -> Stored:
    try:
        return Stored.described(description, name)
    except (TypeError, KeyError, ValueError) as refused:
        raise InvalidAnswer(
            f"expected a tensor's shape and dtype, got {description!r:.200}"
        ) from refused


def _path(name: str) -> str:
    from convgrad.contract import check_stored_name

    check_stored_name(name)  # checked here because some names would change the path
    return f"tensors/{name}"
