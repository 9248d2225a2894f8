"""The requests of the clients: where each goes and how its reply is read."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

from convgrad._body import WIRES, decode_answer
from convgrad._call import Answer, Call
from convgrad._exchange import Target
from convgrad._reply import Reply, read_json, server_timing_s
from convgrad.errors import InvalidAnswer

__all__ = ["LIVE", "OPERATIONS_LIST", "READY", "OperationsInfo", "call_target"]

T = TypeVar("T")
OperationsInfo: TypeAlias = dict[str, dict[str, Any]]


def call_target(call: Call[T], wire: str) -> Target[Answer[T]]:
    """Make the target of a Call; the body is encoded once for all attempts."""

    def read(reply: Reply, attempts: int) -> Answer[T]:
        arrays, report = decode_answer(reply.headers.get("content-type", ""), reply.content)
        return Answer(
            call.read(arrays), report, reply.request_id, server_timing_s(reply.headers), attempts
        )

    return Target("POST", call.operation, WIRES[wire].body(call), read)


def _read_operations(reply: Reply, attempts: int) -> OperationsInfo:
    found = read_json(reply)
    try:
        return {str(item["name"]): dict(item) for item in found["operations"]}
    except (TypeError, KeyError, ValueError) as refused:
        raise InvalidAnswer('expected {"operations": [{"name": …}, …]}') from refused


def _read_nothing(reply: Reply, attempts: int) -> None:
    return None


OPERATIONS_LIST: Target[OperationsInfo] = Target("GET", "operations", None, _read_operations)
LIVE: Target[None] = Target("GET", "v2/health/live", None, _read_nothing)
READY: Target[None] = Target("GET", "v2/health/ready", None, _read_nothing)
