"""A transport for tests of the pipeline: a request's fields and its answer are Python objects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from numpy.typing import NDArray

from convgrad.contract import Report
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import ComputeRequest, Decoded

__all__ = ["InMemory", "Kept", "answer", "begun", "kept"]

T = TypeVar("T")


class Kept(NamedTuple):
    """Copies of a result, which outlive its memory."""

    outputs: Mapping[str, NDArray[Any]]
    report: Report


def kept(execution: Execution) -> Kept:
    """Copies of the outputs, and the report."""
    outputs = {name: array.copy() for name, array in execution.outputs.items()}
    return Kept(outputs, execution.report)


class InMemory(Generic[T]):
    """See `Transport`; both functions run in threads, ``answered`` is what ``encode`` returned."""

    enforces_deadline = decodes_inline = False
    body_lease: Lease | None = None

    def __init__(
        self,
        pipeline: Pipeline,
        request: ComputeRequest,
        decode: Callable[[], Mapping[str, Any]],
        encode: Callable[[Execution], T],
        key: Hashable | None = None,
    ) -> None:
        self.answered: list[T] = []
        self._pipeline, self._request = pipeline, request
        self._decode, self._encode, self._key = decode, encode, key

    async def head(self) -> Hashable | None:
        return self._key

    def decode(self) -> Decoded:
        return Decoded(self._decode())

    async def fill(self, execution: Execution) -> None:
        self._request.timings.enter("decode")
        await execution.fill(execution.request.tensors())

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Nobody goes."""

    async def send(self, execution: Execution) -> None:
        self._request.timings.enter("encode")
        self.answered.append(
            await self._pipeline.in_thread(lambda: self._encode(execution), execution.lease)
        )


async def answer(
    pipeline: Pipeline,
    request: ComputeRequest,
    decode: Callable[[], Mapping[str, Any]],
    encode: Callable[[Execution], T],
) -> T:
    """What ``encode`` makes of the outputs; it must hold no view of them."""
    transport = InMemory(pipeline, request, decode, encode)
    await pipeline.run(request, transport)
    return transport.answered[0]


@asynccontextmanager
async def begun(
    pipeline: Pipeline,
    request: ComputeRequest,
    decode: Callable[[], Decoded],
    *,
    body_lease: Lease | None = None,
) -> AsyncIterator[Execution]:
    """An execution whose inputs the test fills and which it computes itself."""
    execution = await pipeline.prepare(request, decode, body_lease=body_lease)
    try:
        yield execution
    finally:
        await execution.end()
